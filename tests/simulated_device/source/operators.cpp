// What tensors of the simulated device do.  A call checks shapes and allocates at once; what reads
// or writes memory is a closure in the current stream, which runs the CPU's own kernel.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <unordered_set>

#include "device.h"

namespace sim {

void register_device();

namespace {

struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

using c10::IValue;
using torch::jit::Stack;

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == TYPE;
}

size_t end_bytes(at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset, size_t itemsize) {
  return at::detail::computeStorageNbytes(sizes, strides, itemsize, offset);
}

// The tensor as the executor sees it.  It does not keep the memory alive: a kernel does not.
at::Tensor shown(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  const auto needed = end_bytes(tensor.sizes(), tensor.strides(), tensor.storage_offset(),
                                tensor.element_size());
  TORCH_CHECK(tensor.numel() == 0 || needed <= storage.nbytes(), "a tensor of ", needed,
              " bytes lies in a storage of ", storage.nbytes());
  c10::Storage seen(c10::Storage::use_byte_size_t(), storage.nbytes(),
                    c10::DataPtr(shadow(storage.data()), at::kCPU), c10::GetAllocator(at::kCPU),
                    true);  // some kernels resize what they have been given to and fro
  auto made = at::detail::make_tensor<at::TensorImpl>(
      std::move(seen), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                    tensor.storage_offset());
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

void enqueue(int64_t stream, const char* name, std::function<void()> run) {
  Task task;
  task.name = name;
  task.run = std::move(run);
  Scheduler::get().enqueue(stream, std::move(task));
}

// Allocation, views.

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

void make_room(at::TensorImpl* impl) {
  const auto needed = end_bytes(impl->sizes(), impl->strides(), impl->storage_offset(),
                                impl->dtype().itemsize());
  if (impl->numel() && needed > impl->storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(impl->storage(), needed);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size,
                          std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (impl->sizes() != size) impl->set_sizes_contiguous(size);
  make_room(impl);
  if (format) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.data() == nullptr || stride.size() != size.size())
    impl->set_sizes_and_strides(size, c10::contiguous_strides(size), offset);
  else
    impl->set_sizes_and_strides(size, stride, offset);
  make_room(impl);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const int64_t numel = source.nbytes() / self.dtype().itemsize();
  return set_storage(self, std::move(source), 0, {numel}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_storage(self, at::Storage(at::Storage::use_byte_size_t(), 0, device_allocator(), true),
                     0, {0}, {1});
}

// Copies.

bool is_dense(const at::Tensor& tensor) { return tensor.is_non_overlapping_and_dense(); }

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& into, bool non_blocking) {
  if (into.numel() == 0) return into;
  auto from = source.sizes() == into.sizes() ? source : source.expand_as(into);
  auto& scheduler = Scheduler::get();
  if (is_ours(from) && is_ours(into)) {
    auto read = shown(from), write = shown(into);
    const auto stream = current_stream(from.device().index());
    const auto other = current_stream(into.device().index());
    if (stream != other) scheduler.block(stream, scheduler.record(other));
    enqueue(stream, "copy_", [read, write]() mutable { write.copy_(read); });
    if (stream != other) scheduler.block(other, scheduler.record(stream));
    return into;
  }
  if (is_ours(into)) {
    TORCH_CHECK(from.is_cpu(), "cannot copy from ", from.device());
    auto write = shown(into);
    const auto stream = current_stream(into.device().index());
    const bool engine = is_pinned(from.data_ptr()) && from.dtype() == into.dtype() &&
                        is_dense(from) && is_dense(into);
    at::Tensor read;
    if (engine) {
      read = at::from_blob(from.data_ptr(), from.sizes(), from.strides(), from.options());
    } else {
      c10::impl::ExcludeDispatchKeyGuard python(c10::DispatchKey::Python);
      read = from.clone();  // as pageable memory is staged before the call returns
    }
    enqueue(stream, "copy_", [read, write]() mutable { write.copy_(read); });
    const auto mark = scheduler.record(stream, true);
    if (engine) used_until(from.data_ptr(), mark);
    if (!non_blocking) scheduler.wait(mark);
    return into;
  }
  TORCH_CHECK(into.is_cpu(), "cannot copy to ", into.device());
  auto read = shown(from);
  const auto stream = current_stream(from.device().index());
  auto write = at::from_blob(into.data_ptr(), into.sizes(), into.strides(), into.options());
  enqueue(stream, "copy_", [read, write]() mutable { write.copy_(read); });
  const auto mark = scheduler.record(stream, true);
  if (non_blocking && is_pinned(into.data_ptr()))
    used_until(into.data_ptr(), mark);
  else
    scheduler.wait(mark);
  return into;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& into) {
  if (into.sizes() != source.sizes()) into.resize_(source.sizes());
  return copy_from(source, into, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  auto& scheduler = Scheduler::get();
  scheduler.wait(scheduler.record(current_stream(self.device().index()), true));
  return shown(self).item();
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  used_on(self.storage().data(), stream.id());
}

// All others.

// Meta tensors that share memory where the tensors do.
struct Metas {
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages;

  at::Tensor of(const at::Tensor& tensor) {
    auto* key = tensor.storage().unsafeGetStorageImpl();
    auto found = storages.find(key);
    if (found == storages.end()) {
      c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                           c10::DataPtr(nullptr, at::kMeta), c10::GetAllocator(at::kMeta), true);
      found = storages.emplace(key, storage).first;
    }
    auto made = at::detail::make_tensor<at::TensorImpl>(
        c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::Meta), tensor.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                      tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
      made.unsafeGetTensorImpl()->set_wrapped_number(true);
    return made;
  }
};

using Change = std::function<at::Tensor(const at::Tensor&)>;

IValue changed(const IValue& value, const Change& change) {
  if (value.isTensor()) return value.toTensor().defined() ? change(value.toTensor()) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& one : value.toTensorVector()) list.push_back(change(one));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (std::optional<at::Tensor> one : value.toOptionalTensorList())
      list.push_back(one && one->defined() ? std::optional(change(*one)) : one);
    return list;
  }
  return value;
}

bool takes_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

bool has_only_tensors(const c10::FunctionSchema& schema) {
  for (const auto& one : schema.returns()) {
    auto type = one.type();
    if (auto list = type->cast<c10::ListType>()) type = list->getElementType();
    if (type->kind() != c10::TypeKind::TensorType) return false;
  }
  return true;
}

const c10::AliasInfo* alias_of(const c10::Argument& one) { return one.alias_info(); }

// The argument that a return is, or is a view of.
std::optional<size_t> aliased(const c10::FunctionSchema& schema, const c10::Argument& returned) {
  if (!alias_of(returned) || returned.alias_info()->beforeSets().empty()) return std::nullopt;
  for (size_t index = 0; index < schema.arguments().size(); index++) {
    const auto* info = alias_of(schema.arguments()[index]);
    if (info && info->beforeSets() == returned.alias_info()->beforeSets()) return index;
  }
  return std::nullopt;
}

// Operators that take indices from the host, as CUDA's do.
const std::unordered_set<std::string> TAKES_HOST_TENSORS = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"};

std::mutex unknown_mutex;
std::unordered_set<std::string> unknown_on_meta;

void run_operator(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const auto full = name + "." + schema.overload_name();
  const auto count = schema.arguments().size();
  std::vector<IValue> given(stack->end() - count, stack->end());
  stack->erase(stack->end() - count, stack->end());
  at::AutoDispatchBelowADInplaceOrView below;

  int device = -1;
  auto look = [&](const at::Tensor& one) {
    if (is_ours(one)) {
      if (device < 0) device = one.device().index();
      TORCH_CHECK(device == one.device().index(), full, " is given tensors of two devices");
    }
    return one;
  };
  for (auto& value : given) changed(value, look);
  for (auto& value : given)
    if (device < 0 && value.isDevice() && value.toDevice().type() == TYPE)
      device = value.toDevice().has_index() ? value.toDevice().index() : current_device();
  TORCH_CHECK(device >= 0, full, " has nothing on the simulated device");
  c10::DeviceGuard guard(c10::Device(TYPE, device));
  const auto stream = current_stream(device);

  // Arguments for the kernel, and for shapes.
  Metas metas;
  Stack kernel, shapes;
  auto to_kernel = [&](const at::Tensor& one) -> at::Tensor {
    if (!one.defined()) return one;
    if (is_ours(one)) return shown(one);
    TORCH_CHECK(one.dim() == 0 || TAKES_HOST_TENSORS.count(name),
                "Expected all tensors to be on the same device, but ", full, " got one on ",
                one.device());
    auto copy = one.clone();
    if (one.unsafeGetTensorImpl()->is_wrapped_number())
      copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  };
  auto to_meta = [&](const at::Tensor& one) -> at::Tensor {
    return is_ours(one) ? metas.of(one) : (one.defined() && one.dim() ? one.to(at::kMeta) : one);
  };
  bool draws = false;
  for (size_t index = 0; index < count; index++) {
    const auto& value = given[index];
    if (takes_generator(schema.arguments()[index])) {
      draws = true;
      std::optional<at::Generator> generator;
      if (value.isGenerator()) generator = value.toGenerator();
      kernel.emplace_back(drawing(generator, device));
      shapes.emplace_back();
    } else if (value.isDevice()) {
      kernel.emplace_back(at::Device(at::kCPU));
      shapes.emplace_back(at::Device(at::kMeta));
    } else {
      kernel.push_back(changed(value, to_kernel));
      shapes.push_back(value);  // changed where they are needed
    }
  }
  TORCH_CHECK_NOT_IMPLEMENTED(draws || !op.hasTag(at::Tag::nondeterministic_seeded), full,
                              " draws from no generator");

  const bool in_place = [&] {
    for (const auto& one : schema.returns())
      if (!aliased(schema, one) || !one.alias_info()->isWrite()) return false;
    return name.back() == '_' || schema.returns().empty();
  }();
  bool knows_shapes = in_place || has_only_tensors(schema);
  if (knows_shapes && !in_place) {
    std::lock_guard<std::mutex> lock(unknown_mutex);
    knows_shapes = !unknown_on_meta.count(full);
  }
  if (knows_shapes && !in_place) {
    for (auto& value : shapes) value = changed(value, to_meta);
    Silent silent;
    c10::WarningUtils::WarningHandlerGuard no_warnings(&silent);
    try {
      op.callBoxed(&shapes);
    } catch (const std::exception& error) {  // from C++ or from Python
      const bool unknown = dynamic_cast<const c10::NotImplementedError*>(&error) ||
                           std::string(error.what()).find("NotImplementedError") != std::string::npos;
      if (!unknown) throw;
      std::lock_guard<std::mutex> lock(unknown_mutex);
      unknown_on_meta.insert(full);
      knows_shapes = false;
    }
  }

  if (!knows_shapes) {  // they depend on values: the host waits, as CUDA's kernels do
    auto results = std::make_shared<Stack>(kernel);
    enqueue(stream, full.c_str(), [op, results] {
      c10::InferenceMode on;  // what the host made under it may be written to
      op.callBoxed(results.get());
    });
    auto& scheduler = Scheduler::get();
    scheduler.wait(scheduler.record(stream, true));
    for (size_t index = 0; index < results->size(); index++) {
      auto& value = (*results)[index];
      const auto of = aliased(schema, schema.returns()[index]);
      if (of && schema.returns()[index].alias_info()->isWrite()) {
        auto self = given[*of].toTensor();
        auto result = value.toTensor();
        if (self.sizes() != result.sizes()) {
          self.resize_(result.sizes());
          enqueue(stream, full.c_str(), [write = shown(self), result]() mutable { write.copy_(result); });
        }
        stack->push_back(given[*of]);
        continue;
      }
      stack->push_back(changed(value, [&](const at::Tensor& result) {
        if (!result.defined()) return result;
        auto out = empty_strided(result.sizes(), result.strides(), result.scalar_type(),
                                 std::nullopt, c10::Device(TYPE, device), std::nullopt);
        enqueue(stream, full.c_str(), [write = shown(out), result]() mutable { write.copy_(result); });
        return out;
      }));
    }
    return;
  }

  // What it returns: an argument, a view of one, or memory that is new.
  auto writes = std::make_shared<std::vector<at::Tensor>>();
  std::vector<IValue> returned;
  for (size_t index = 0; index < schema.returns().size(); index++) {
    const auto of = aliased(schema, schema.returns()[index]);
    if (of && schema.returns()[index].alias_info()->isWrite()) {
      if (!in_place && shapes[index].isTensor()) {
        auto self = given[*of].toTensor();
        auto like = shapes[index].toTensor();
        if (self.sizes() != like.sizes()) {
          self.resize_(like.sizes());
          if (self.strides() != like.strides())
            self.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
          kernel[*of] = shown(self);
        }
      }
      returned.push_back(given[*of]);
      continue;
    }
    if (of) {
      TORCH_CHECK_NOT_IMPLEMENTED(shapes[index].isTensor(), full, " returns views");
      auto like = shapes[index].toTensor();
      auto view = at::native::as_strided_tensorimpl(given[*of].toTensor(), like.sizes(),
                                                    like.strides(), like.storage_offset());
      stack->push_back(view);
      return;
    }
    returned.push_back(changed(shapes[index], [&](const at::Tensor& like) {
      if (!like.defined()) {
        writes->emplace_back();
        return like;
      }
      auto out = empty_strided(like.sizes(), like.strides(), like.scalar_type(), std::nullopt,
                               c10::Device(TYPE, device), std::nullopt);
      writes->push_back(shown(out));
      return out;
    }));
    if (returned.back().isTensor() && !returned.back().toTensor().defined() && writes->empty())
      writes->emplace_back();
  }
  // What a kernel has resized is elsewhere, and is copied back.
  std::vector<std::pair<at::Tensor, at::Tensor>> outs;
  for (size_t index = 0; index < schema.returns().size() && !in_place; index++)
    if (const auto of = aliased(schema, schema.returns()[index]); of && kernel[*of].isTensor())
      outs.emplace_back(kernel[*of].toTensor(), shown(given[*of].toTensor()));
  auto arguments = std::make_shared<Stack>(std::move(kernel));
  enqueue(stream, full.c_str(), [op, arguments, writes, full, outs] {
    const auto& schema = op.schema();
    c10::InferenceMode on;  // what the host made under it may be written to
    op.callBoxed(arguments.get());
    for (auto [given, pristine] : outs)
      if (given.storage().data() != pristine.storage().data()) pristine.copy_(given);
    size_t position = 0;
    for (size_t index = 0; index < schema.returns().size(); index++) {
      if (aliased(schema, schema.returns()[index])) continue;
      changed((*arguments)[index], [&](const at::Tensor& result) {
        auto write = writes->at(position++);
        if (!result.defined() || !write.defined()) return result;
        if (!result.numel()) return result;  // the statistics that an evaluation does not give
        TORCH_CHECK(write.sizes() == result.sizes(), full, " gives ", result.sizes(), " and not ",
                    write.sizes());
        write.copy_(result);
        return result;
      });
      const auto& value = (*arguments)[index];
      if (value.isTensor() && !value.toTensor().defined()) position++;
    }
  });
  for (auto& value : returned) stack->push_back(std::move(value));
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                  std::optional<bool> train) {
  if (train && !*train) return {input.clone(), at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

at::Tensor native_dropout_backward(const at::Tensor& grad, const at::Tensor& mask, double scale) {
  return grad.mul(mask).mul_(scale);
}

int64_t math_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                       const std::optional<at::Tensor>&, double, bool, std::optional<double>,
                       bool) {
  return 0;
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", at::native::view);
  m.impl("unfold", at::native::unfold);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", native_dropout);
  m.impl("native_dropout_backward", native_dropout_backward);
  m.impl("_fused_sdp_choice", math_attention);
  // torch's own kernels of these know the backends by name, or are others than the CPU's.
  for (const char* name : {"convolution", "convolution_backward", "native_layer_norm",
                           "native_group_norm", "silu_backward", "mish_backward", "addr"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_operator>());
}

}  // namespace sim
