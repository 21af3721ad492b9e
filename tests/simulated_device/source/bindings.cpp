#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/extension.h>

#include "device.h"

namespace sim {
void register_device();
void bind_collectives(py::module& m);
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  m.def("register_device", &register_device);
  m.def("choose", [](const std::string& policy, uint64_t seed) {
    Scheduler::get().choose(policy == "late"     ? Policy::late
                            : policy == "random" ? Policy::random
                                                 : Policy::early,
                            seed);
  });
  m.def("waits", [] { return Scheduler::get().waits(); });
  m.def("tasks", [] { return Scheduler::get().tasks(); });
  m.def("stop", [] { Scheduler::get().stop(); }, py::call_guard<py::gil_scoped_release>());
  m.def("register_host", &register_host);
  m.def("unregister_host", &unregister_host);
  m.def("device_count", [] { return DEVICES; });
  m.def("current_device", &current_device);
  m.def("set_device", &set_current_device);
  m.def("default_generator", [](int device) {
    return at::detail::getPrivateUse1Hooks().getDefaultGenerator(device);
  });
  m.def("allocated_bytes", &allocated_bytes);
  m.def("peak_bytes", &peak_bytes);
  m.def("reset_peak", &reset_peak);
  bind_collectives(m);
}
