// A device of torch's own kind whose memory is the CPU's: the operators are the CPU's, the rules are a GPU's.
// A tensor of the CPU may stand beside one of the device if it has no dimensions, and nothing of the device
// is read by numpy or by an address.

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

namespace {

constexpr auto kKey = c10::DispatchKey::PrivateUse1;
constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);
const c10::Stream kStream(c10::Stream::DEFAULT, kDevice);

// ---- one device, one stream, memory -------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return kStream; }
  c10::Stream getDefaultStream(c10::Device) const override { return kStream; }
  c10::Stream exchangeStream(c10::Stream) const override { return kStream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static auto generator = at::detail::getDefaultCPUGenerator();
    return generator;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    at::native::resize_bytes_nocuda(storage, bytes);
  }
};

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = bytes ? malloc(bytes) : nullptr;
    // As torch's own devices do then: memory that nobody has written to holds NaN.
    if (bytes && at::globalContext().deterministicAlgorithms()) memset(address, 0xFF, bytes);
    return {address, address, &free, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(kType, &memory);

// ---- what a fallback to the CPU cannot do --------------------------------------------------------------

at::Tensor empty_memory_format(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory, c10::DispatchKeySet(kKey),
      c10::dtype_or_default(dtype));
}

// The tensor as one of the CPU in the same memory.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (tensor.device().type() != kType) return tensor;
  auto* begin = static_cast<char*>(const_cast<void*>(tensor.storage().data()));
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  auto same = at::from_blob(
      begin + tensor.storage_offset() * tensor.itemsize(), tensor.sizes(), tensor.strides(),
      [tensor](void*) {}, options);
  if (tensor.is_conj()) same = same.conj();
  return tensor.is_neg() ? same._neg_view() : same;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  if (to.numel()) on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) { return on_cpu(tensor).item(); }

at::Tensor& set_storage(
    at::Tensor& tensor, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return tensor;
}

const at::Tensor& resize(
    const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  at::native::resize_impl_cpu_(tensor.unsafeGetTensorImpl(), C10_AS_INTARRAYREF_SLOW(size), std::nullopt);
  return tensor;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto name = op.schema().name();
  bool here = false, elsewhere = false;
  auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    here |= tensor.device().type() == kType;
    elsewhere |= tensor.device().is_cpu() && tensor.dim() > 0;
  };
  for (const auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (value.isTensor()) look(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) look(tensor);
  }
  const bool may_mix = name.find("index") != std::string::npos || name.find("copy") != std::string::npos;
  TORCH_CHECK(
      may_mix || !(here && elsewhere),
      "Expected all tensors to be on the same device, but found at least two devices, ", kDevice, " and cpu! (",
      name, ")");
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  using at::IntArrayRef;
  using at::Tensor;
  library.impl("empty.memory_format", &empty_memory_format);
  library.impl("empty_strided", &empty_strided);
  library.impl(
      "as_strided", static_cast<Tensor (*)(const Tensor&, IntArrayRef, IntArrayRef, std::optional<int64_t>)>(
                        at::native::as_strided_tensorimpl));
  library.impl("view", static_cast<Tensor (*)(const Tensor&, IntArrayRef)>(at::native::view));
  library.impl(
      "_reshape_alias",
      static_cast<Tensor (*)(const Tensor&, IntArrayRef, IntArrayRef)>(at::native::_reshape_alias));
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("resize_", &resize);
}
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }
// What autocast does on CUDA, operator by operator: it is more than on the CPU (einsum, pow).
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define RAISE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define RAISE_RESULT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(RAISE)
  AT_FORALL_FP32_SET_OPT_DTYPE(RAISE_RESULT)
  AT_FORALL_PROMOTE(PROMOTE)
}
// A copy takes lazily conjugated memory as it is: torch would resolve it by another copy, for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { at::RegisterPrivateUse1HooksInterface(new Hooks()); }
