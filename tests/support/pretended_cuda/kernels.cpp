// Kernels of the pretended devices: the CPU's, on the same memory, after the checks that CUDA would make.
#include "devices.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>
#include <set>

namespace pretended {
namespace {

using at::Tensor;
using c10::Device;

// Operators that take tensors of several devices on CUDA, too.
const std::set<std::string> kTakesSeveralDevices = {
    "aten::_fused_adamw_",  // the learning rate may be on the CPU
    "aten::_index_put_impl_",
    "aten::_unsafe_index",
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
};
// Operators whose result has a size that the host must know, so that it waits for the device.
const std::set<std::string> kWaits = {
    "aten::_unique2", "aten::equal", "aten::masked_select", "aten::nonzero", "aten::unique_consecutive", "aten::unique_dim",
};
const std::set<std::string> kIndexes = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};

void check_same_device(const Tensor& tensor, const std::optional<Device>& device, const std::string& name) {
  const bool is_number = tensor.dim() == 0 && tensor.is_cpu();
  TORCH_CHECK(
      is_number || !device || tensor.device() == *device,
      "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ", tensor.device(),
      "! (when checking arguments of ", name, ")");
}

// The tensors of a call's arguments or results.
template <typename Function>
void for_each_tensor(const c10::IValue& value, const Function& function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) function(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) function(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      if (tensor && tensor->defined()) function(*tensor);
  }
}

template <typename Function>
c10::IValue map_tensors(const c10::IValue& value, const Function& function) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(function(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> mapped;
    for (const Tensor& tensor : value.toTensorVector()) mapped.push_back(function(tensor));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> mapped;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      mapped.push_back(tensor && tensor->defined() ? std::optional<Tensor>(function(*tensor)) : std::nullopt);
    return mapped;
  }
  return value;
}

// An output whose memory the kernel has replaced, because it had to be larger.
void follow_resize(const Tensor& device_tensor, const Tensor& host) {
  if (host.storage().data() != device_tensor.storage().data() || host.storage().nbytes() != device_tensor.storage().nbytes()) {
    resize_storage(device_tensor.storage(), host.storage().nbytes());
    if (host.storage().nbytes())
      std::memcpy(device_tensor.storage().mutable_data(), host.storage().data(), host.storage().nbytes());
  }
  if (host.sizes() != device_tensor.sizes() || host.strides() != device_tensor.strides())
    device_tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
}

// Run the CPU's kernel of any operator on host views of its arguments.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  const size_t num_arguments = schema.arguments().size(), begin = stack->size() - num_arguments;
  std::optional<Device> device;
  bool indexes_by_mask = false;
  const bool may_index = kIndexes.count(name) > 0;
  for (size_t i = begin; i < stack->size(); ++i) {
    const auto& value = (*stack)[i];
    if (value.isDevice() && value.toDevice().is_cuda() && !device) device = value.toDevice();
    for_each_tensor(value, [&](const Tensor& tensor) {
      if (tensor.is_cuda() && !device) device = tensor.device();
      indexes_by_mask |= may_index && value.isOptionalTensorList() && tensor.scalar_type() == at::kBool;
    });
  }
  if (!kTakesSeveralDevices.count(name))
    for (size_t i = begin; i < stack->size(); ++i)
      for_each_tensor((*stack)[i], [&](const Tensor& tensor) { check_same_device(tensor, device, name); });
  const auto index = device && device->has_index() ? device->index() : current_device();
  const Device target(at::kCUDA, index);
  if (indexes_by_mask || kWaits.count(name)) note("wait " + name.substr(name.find("::") + 2));
  run_pending_copies(index);

  std::vector<std::pair<Tensor, Tensor>> views;  // device tensor, host view
  for (size_t i = begin; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isDevice() && value.toDevice().is_cuda()) value = Device(at::kCPU);
    value = map_tensors(value, [&](const Tensor& tensor) {
      if (!tensor.is_cuda()) return tensor;
      views.emplace_back(tensor, host_view(tensor));
      return views.back().second;
    });
  }
  op.callBoxedForDispatchKey(c10::DispatchKey::CPU, *stack);
  for (const auto& [tensor, host] : views) follow_resize(tensor, host);
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    (*stack)[i] = map_tensors((*stack)[i], [&](const Tensor& result) {
      for (const auto& [tensor, host] : views)
        if (host.is_same(result)) return tensor;
      return on_device(result, target);
    });
}

// ------------------------------------------------------------------------------------------------- memory and copies

// Allocations are made on the thread's current device; this makes it another one meanwhile. As with CUDA's guards, going
// back makes no context.
class OnDevice {
 public:
  explicit OnDevice(std::optional<Device> device) : before_(current_device()) {
    if (device && device->has_index() && device->index() != before_) set_device(device->index());
  }
  ~OnDevice() { restore_device(before_); }

 private:
  c10::DeviceIndex before_;
};

const c10::DispatchKeySet kCudaKey(c10::DispatchKey::CUDA);

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const OnDevice on(device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), device_allocator(), kCudaKey, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const OnDevice on(device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), device_allocator(), kCudaKey,
      c10::dtype_or_default(dtype));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source)) return self;
  const auto device = (self.is_cuda() ? self : source).device().index();
  run_pending_copies(device);
  const auto to = host_view(self), from = host_view(source);
  if (self.is_cuda() != source.is_cuda()) {
    const auto& host = self.is_cuda() ? source : self;
    const bool is_async = non_blocking && is_pinned(host.const_data_ptr());
    if (!is_async) note(self.is_cuda() ? "wait copy from pageable memory" : "wait copy to host");
    const bool is_plain = self.scalar_type() == source.scalar_type() && self.sizes() == source.sizes() &&
        self.is_contiguous() && source.is_contiguous();
    if (is_async && is_plain && copies_are_late()) {
      if (!self.is_cuda()) note("late copy to host");
      copy_later(to, from, self.nbytes(), device);
      return self;
    }
  }
  to.copy_(from);
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  Tensor target = to;
  return copy_(target, self, non_blocking);
}

at::Scalar local_scalar(const Tensor& self) {
  note("wait item");
  run_pending_copies(self.device().index());
  return host_view(self).item();
}

// ------------------------------------------------------------------------------------------------- views and storages

void grow_storage(const Tensor& self) {
  const size_t needed = (self.storage_offset() + self.numel()) * self.itemsize();
  if (self.numel() && needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  grow_storage(self);
  return self;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (to.sizes() != self.sizes()) resize_(to, self.sym_sizes(), std::nullopt);
  return copy_from(self, to, false);
}

Tensor& set_to_storage_part(Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                            c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !size.empty()) {
    impl->set_storage_offset(offset.expect_int());
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  }
  return self;
}

Tensor& set_to_storage(Tensor& self, at::Storage storage) {
  const c10::SymInt numel(static_cast<int64_t>(storage.nbytes() / self.itemsize()));
  return set_to_storage_part(self, std::move(storage), 0, {numel}, {});
}

Tensor& set_to_tensor(Tensor& self, const Tensor& source) {
  return set_to_storage_part(self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  const auto first = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), first);
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

// ---------------------------------------------------------------------------------------- what only CUDA builds have

constexpr int64_t kMathAttention = 0;  // at::SDPBackend::math

int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return kMathAttention;
}

void record_stream(Tensor&, at::Stream) {}  // a storage lives as long as a copy that is queued needs it

// beta * self + alpha * a @ b, computed and returned in a wider type than a and b have.
Tensor& addmm_to_dtype(const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType dtype, const at::Scalar& beta,
                       const at::Scalar& alpha, Tensor& out) {
  TORCH_CHECK(a.scalar_type() == b.scalar_type(), "mat1 and mat2 must have the same dtype");
  TORCH_CHECK(out.scalar_type() == dtype, "out_dtype must be the dtype of the output");
  run_pending_copies(self.device().index());
  const auto product = host_view(a).to(dtype).mm(host_view(b).to(dtype));
  host_view(out).copy_(host_view(self).to(dtype).mul(beta).add(product, alpha));
  return out;
}

void resize_storage_of(const Tensor& self, int64_t bytes) { resize_storage(self.storage(), bytes); }

}  // namespace
}  // namespace pretended

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&pretended::run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(pretended::empty));
  m.impl("empty_strided", TORCH_FN(pretended::empty_strided));
  m.impl("copy_", TORCH_FN(pretended::copy_));
  m.impl("_copy_from", TORCH_FN(pretended::copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(pretended::copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(pretended::local_scalar));
  m.impl("resize_", TORCH_FN(pretended::resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(pretended::set_to_storage_part));
  m.impl("set_.source_Storage", TORCH_FN(pretended::set_to_storage));
  m.impl("set_.source_Tensor", TORCH_FN(pretended::set_to_tensor));
  m.impl("view", TORCH_FN(pretended::view));
  m.impl("as_strided", TORCH_FN(pretended::as_strided));
  m.impl("_reshape_alias", TORCH_FN(pretended::reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("_fused_sdp_choice", TORCH_FN(pretended::choose_attention));
  m.impl("record_stream", TORCH_FN(pretended::record_stream));
  m.impl("addmm.dtype_out", TORCH_FN(pretended::addmm_to_dtype));
}

TORCH_LIBRARY(pretended_cuda, m) { m.def("resize_storage(Tensor self, int bytes) -> ()", &pretended::resize_storage_of); }
