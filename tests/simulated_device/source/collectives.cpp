// A process group with NCCL's contract: a call enqueues behind what the current stream has been
// given, `wait` makes the current stream wait, and nothing keeps the tensors' memory but the work.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/extension.h>

#include "device.h"

namespace sim {

namespace {

using at::Tensor;

Tensor bytes_of(const Tensor& tensor) {
  TORCH_CHECK(tensor.device().type() == TYPE, "this group's collectives are of the device");
  TORCH_CHECK(tensor.is_contiguous(), "collectives take contiguous tensors");
  auto* data = static_cast<char*>(shadow(tensor.storage().data()));
  if (data) data += tensor.storage_offset() * tensor.element_size();
  return at::from_blob(data, {static_cast<int64_t>(tensor.nbytes())}, at::kByte);
}

void reduce_into(Tensor& sum, const Tensor& value, c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::AVG: sum.add_(value); break;
    case c10d::ReduceOp::PRODUCT: sum.mul_(value); break;
    case c10d::ReduceOp::MIN: at::minimum_out(sum, sum, value); break;
    case c10d::ReduceOp::MAX: at::maximum_out(sum, sum, value); break;
    default: TORCH_CHECK(false, "no such reduction");
  }
}

// Over the values of all ranks, in their order: rows of `all`.
Tensor reduced(const Tensor& all, c10d::ReduceOp::RedOpType op) {
  auto sum = all[0].clone();
  for (int64_t rank = 1; rank < all.size(0); rank++) reduce_into(sum, all[rank], op);
  if (op == c10d::ReduceOp::AVG) sum.div_(all.size(0));
  return sum;
}

struct Work final : c10d::Work {
  MarkPtr mark;
  int device;
  std::vector<Tensor> outputs, held;
  c10::intrusive_ptr<c10::ivalue::Future> future;

  Work(int rank, c10d::OpType kind, int device) : c10d::Work(rank, kind), device(device) {}
  bool isCompleted() override { return Scheduler::get().is_done(mark); }
  bool isSuccess() const override { return true; }
  std::vector<Tensor> result() override { return outputs; }
  void synchronize() override {
    Scheduler::get().block(current_stream(device), mark);
    held.clear();
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
};

struct Group final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  std::map<int, int64_t> streams;
  uint64_t calls = 0;

  Group(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size)
      : c10d::Backend(rank, size), gloo(std::move(gloo)) {}

  const std::string getBackendName() const override { return "simulated"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return calls; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }

  using Begin = std::function<c10::intrusive_ptr<c10d::Work>()>;

  c10::intrusive_ptr<c10d::Work> start(const char* name, c10d::OpType kind, std::vector<Tensor> held,
                                       std::vector<Tensor> outputs, Begin begin,
                                       std::function<void()> end) {
    calls++;
    const int device = held.empty() ? current_device() : held.front().device().index();
    auto& scheduler = Scheduler::get();
    if (!streams.count(device)) streams[device] = scheduler.new_stream(device);
    const auto stream = streams[device];
    scheduler.block(stream, scheduler.record(current_stream(device)));
    auto under_way = std::make_shared<c10::intrusive_ptr<c10d::Work>>();
    Task task;
    task.name = name;
    task.run = [under_way, begin] { *under_way = begin(); };
    task.poll = [under_way, end] {
      if (*under_way && !(*under_way)->isCompleted()) return false;
      if (*under_way) (*under_way)->wait();
      if (end) end();
      return true;
    };
    scheduler.enqueue(stream, std::move(task));
    auto work = c10::make_intrusive<Work>(getRank(), kind, device);
    work->mark = scheduler.record(stream);
    work->held = std::move(held);
    work->outputs = std::move(outputs);
    return work;
  }

  Begin gather(const Tensor& all, const Tensor& own) {
    return [gloo = gloo, all = Tensor(all), own = Tensor(own)]() mutable {
      if (!own.numel()) return c10::intrusive_ptr<c10d::Work>();
      return gloo->_allgather_base(all, own);
    };
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(Tensor& output, Tensor& input,
                                                 const c10d::AllgatherOptions&) override {
    auto all = bytes_of(output), own = bytes_of(input);
    // In place, gloo is given what it reads apart from what it writes.
    return start("all_gather", c10d::OpType::_ALLGATHER_BASE, {output, input}, {output},
                 [gloo = gloo, all, own]() mutable {
                   auto apart = own.clone();
                   if (!own.numel()) return c10::intrusive_ptr<c10d::Work>();
                   return gloo->_allgather_base(all, apart);
                 },
                 {});
  }

  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<Tensor>>& outputs,
                                           std::vector<Tensor>& inputs,
                                           const c10d::AllgatherOptions&) override {
    auto own = bytes_of(inputs[0]);
    std::vector<Tensor> into, held = outputs[0];
    for (auto& one : outputs[0]) into.push_back(bytes_of(one));
    held.push_back(inputs[0]);
    auto all = at::empty({getSize() * own.numel()}, own.options());
    return start("all_gather", c10d::OpType::ALLGATHER, held, outputs[0], gather(all, own),
                 [all, into]() mutable {
                   auto rows = all.view({static_cast<int64_t>(into.size()), -1});
                   for (size_t rank = 0; rank < into.size(); rank++)
                     if (into[rank].numel()) into[rank].copy_(rows[rank]);
                 });
  }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    auto& tensor = tensors[0];
    auto own = bytes_of(tensor);
    auto all = at::empty({getSize(), own.numel()}, own.options());
    auto flat = all.view(-1);
    return start("all_reduce", c10d::OpType::ALLREDUCE, {tensor}, {tensor}, gather(flat, own),
                 [all, own, dtype = tensor.scalar_type(), op = options.reduceOp.op_]() mutable {
                   if (own.numel()) own.view(dtype).copy_(reduced(all.view(dtype), op));
                 });
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto mine = bytes_of(output), own = bytes_of(input);
    auto all = at::empty({getSize(), mine.numel()}, own.options());
    auto flat = all.view(-1);
    return start("reduce_scatter", c10d::OpType::_REDUCE_SCATTER_BASE, {output, input}, {output},
                 [gloo = gloo, flat, own]() mutable {
                   std::vector<int64_t> none;
                   if (!own.numel()) return c10::intrusive_ptr<c10d::Work>();
                   return gloo->alltoall_base(flat, own, none, none);
                 },
                 [all, mine, dtype = output.scalar_type(), op = options.reduceOp.op_]() mutable {
                   if (mine.numel()) mine.view(dtype).copy_(reduced(all.view(dtype), op));
                 });
  }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    auto own = bytes_of(tensors[0]);
    return start("broadcast", c10d::OpType::BROADCAST, tensors, tensors,
                 [gloo = gloo, own, options]() mutable {
                   std::vector<Tensor> one{own};
                   if (!own.numel()) return c10::intrusive_ptr<c10d::Work>();
                   return gloo->broadcast(one, options);
                 },
                 {});
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(Tensor& output, Tensor& input,
                                               std::vector<int64_t>& received,
                                               std::vector<int64_t>& sent,
                                               const c10d::AllToAllOptions&) override {
    auto in_bytes = [](std::vector<int64_t> sizes, const Tensor& tensor) {
      const int64_t row = tensor.dim() && tensor.size(0) ? tensor.nbytes() / tensor.size(0) : 0;
      for (auto& size : sizes) size *= row ? row : static_cast<int64_t>(tensor.element_size());
      return sizes;
    };
    auto into = bytes_of(output), own = bytes_of(input);
    auto receives = in_bytes(received, output), sends = in_bytes(sent, input);
    return start("all_to_all", c10d::OpType::ALLTOALL_BASE, {output, input}, {output},
                 [gloo = gloo, into, own, receives, sends]() mutable {
                   return gloo->alltoall_base(into, own, receives, sends);
                 },
                 {});
  }

  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    auto work = start("barrier", c10d::OpType::BARRIER, {}, {},
                      [gloo = gloo] { return gloo->barrier(); }, {});
    Scheduler::get().wait(static_cast<Work*>(work.get())->mark);
    return work;
  }
};

}  // namespace

void bind_collectives(py::module& m) {
  m.def("group", [](const c10::intrusive_ptr<c10d::Backend>& gloo, int rank, int size)
                     -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Group>(gloo, rank, size);
  });
}

}  // namespace sim
