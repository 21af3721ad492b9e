#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>

#include "device.h"

namespace sim {

namespace {

struct Default {
  std::array<int64_t, DEVICES> streams;
  Default() {
    for (int device = 0; device < DEVICES; device++)
      streams[device] = Scheduler::get().new_stream(device);
  }
};

const Default& defaults() {
  static auto* one = new Default();
  return *one;
}

// As on CUDA these are a thread's own, and a new thread begins with device 0.
thread_local int this_device = 0;
thread_local std::array<int64_t, DEVICES> this_stream{};

int index_of(c10::Device device) { return device.has_index() ? device.index() : this_device; }

struct Event {
  MarkPtr mark;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const int before = this_device;
    setDevice(device);
    return {TYPE, static_cast<c10::DeviceIndex>(before)};
  }
  c10::Device getDevice() const override {
    return {TYPE, static_cast<c10::DeviceIndex>(this_device)};
  }
  void setDevice(c10::Device device) const override { set_current_device(index_of(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    this_device = index_of(device);
  }
  c10::Stream getStream(c10::Device device) const override {
    return as_stream(current_stream(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return as_stream(default_stream(index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return as_stream(Scheduler::get().new_stream(index_of(device)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return as_stream(exchange_stream(stream.device_index(), stream.id()));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    static_cast<Event*>(*event)->mark = Scheduler::get().record(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) Scheduler::get().block(stream.id(), static_cast<Event*>(event)->mark);
  }
  bool queryEvent(void* event) const override {
    return !event || Scheduler::get().is_done(static_cast<Event*>(event)->mark);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  bool queryStream(const c10::Stream& stream) const override {
    return Scheduler::get().is_idle(stream.id());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Scheduler::get().wait(Scheduler::get().record(stream.id(), true));
  }
  void synchronizeEvent(void* event) const override {
    if (event) Scheduler::get().wait(static_cast<Event*>(event)->mark);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Scheduler::get().wait_device(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    used_on(data.get(), stream.id());
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    auto *a = static_cast<Event*>(from), *b = static_cast<Event*>(to);
    TORCH_CHECK(a && b && queryEvent(a) && queryEvent(b), "events that are not done have no time");
    return std::chrono::duration<double, std::milli>(b->mark->at - a->mark->at).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Draws as the CPU's generator of the same seed does, in the order of the calls.  A new seed or
// state is another generator, so that what has been enqueued before draws from the old one.
struct Generator final : c10::GeneratorImpl {
  at::Generator cpu;

  explicit Generator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(TYPE, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(at::detail::createCPUGenerator()) {}

  void set_current_seed(uint64_t seed) override { cpu = at::detail::createCPUGenerator(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "this generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "this generator has no offset"); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override {
    auto seed = c10::detail::getNonDeterministicRandom();
    set_current_seed(seed);
    return seed;
  }
  void set_state(const c10::TensorImpl& state) override {
    cpu = at::detail::createCPUGenerator();
    cpu.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    Scheduler::get().wait_device(device_.index());
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    auto* other = new Generator(device_.index());
    other->set_state(*get_state());
    return other;
  }
};

const at::Generator& default_generator(int device) {
  static auto* all = new std::vector<at::Generator>([] {
    std::vector<at::Generator> made;
    for (int index = 0; index < DEVICES; index++) made.push_back(at::make_generator<Generator>(index));
    return made;
  }());
  return all->at(device < 0 ? this_device : device);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? this_device : device);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    TORCH_CHECK(is_device_memory(data), "no memory of the simulated device");
    return {TYPE, static_cast<c10::DeviceIndex>(this_device)};
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return this_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = this_device;
    if (device >= 0) set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const int device = storage.device().index(), before = this_device;
    this_device = device;
    auto into = bytes ? device_allocator()->allocate(bytes)
                      : c10::DataPtr(nullptr, c10::Device(TYPE, device));
    this_device = before;
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept && storage.data()) {
      Task task;
      task.name = "resize";
      task.run = [to = shadow(into.get()), from = shadow(storage.data()), kept] {
        memcpy(to, from, kept);
      };
      Scheduler::get().enqueue(current_stream(device), std::move(task));
    }
    storage.set_data_ptr_noswap(std::move(into));
    storage.set_nbytes(bytes);
  }
};

}  // namespace

int current_device() { return this_device; }

void set_current_device(int device) {
  TORCH_CHECK(0 <= device && device < DEVICES, "no simulated device ", device);
  this_device = device;
}

int64_t default_stream(int device) { return defaults().streams.at(device); }

int64_t current_stream(int device) {
  auto& stream = this_stream.at(device);
  if (!stream) stream = default_stream(device);
  return stream;
}

int64_t exchange_stream(int device, int64_t stream) {
  const auto before = current_stream(device);
  this_stream.at(device) = stream;
  return before;
}

c10::Stream as_stream(int64_t stream) {
  const auto device = static_cast<c10::DeviceIndex>(Scheduler::get().device_of(stream));
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, device), stream);
}

at::Generator drawing(const std::optional<at::Generator>& generator, int device) {
  const auto& chosen = generator && generator->defined() ? *generator : default_generator(device);
  if (chosen.device().type() != TYPE) return chosen;
  return static_cast<Generator*>(chosen.unsafeGetGeneratorImpl())->cpu;
}

void register_device() {
  c10::SetAllocator(TYPE, device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

}  // namespace sim
