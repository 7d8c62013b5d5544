// CUDA devices without CUDA, for CPU builds of torch: tensors on "cuda:N" whose memory is the host's.
//
// Kernels are those of the CPU, run at once on the same memory, so results are true numbers. What a real device does
// later is told to Python as it happens: which stream reads and writes which memory, who makes streams wait for each
// other, when the host waits, and what is allocated and freed. The clocks in clocks.py say whether that is in order.
// To be loaded after libtorch_cpu and before `import torch`.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <map>

namespace {
constexpr auto kCUDA = c10::DeviceType::CUDA;
constexpr int kDevices = 4;

// Set by Python. `ran` gets the storages that an operator touches, and whether it writes each.
struct Listener {
  void (*ran)(const char* name, int device, int64_t stream, int count, const int64_t* storages, const bool* writes);
  void (*allocated)(int64_t storage, int64_t bytes, int device, int64_t stream);
  void (*freed)(int64_t storage);
  void (*host_waits)(const char* why, int device, int64_t stream);
  int64_t (*recorded)(int device, int64_t stream);  // returns the number of the event
  void (*waits)(int device, int64_t stream, int64_t event);
};
Listener listener{};
bool listening = false;

thread_local c10::DeviceIndex current_device = 0;
thread_local int64_t current_streams[kDevices] = {};

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(c10::Device device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, device, id);
  }
  c10::DeviceType type() const override { return kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before(kCUDA, current_device);
    current_device = device.index();
    return before;
  }
  c10::Device getDevice() const override { return {kCUDA, current_device}; }
  void setDevice(c10::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return stream(device, current_streams[device.index()]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(device, 0); }
  c10::Stream exchangeStream(c10::Stream other) const override {
    auto before = getStream(other.device());
    current_streams[other.device_index()] = other.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (listening) *event = reinterpret_cast<void*>(listener.recorded(on.device_index(), on.id()));
  }
  void block(void* event, const c10::Stream& on) const override {
    if (listening) listener.waits(on.device_index(), on.id(), reinterpret_cast<int64_t>(event));
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& on) const override {
    if (listening) listener.host_waits("synchronize", on.device_index(), on.id());
  }
};
Guard guard;
c10::impl::DeviceGuardImplRegistrar registered_guard(kCUDA, &guard);

void free_memory(void* memory) {
  if (listening) listener.freed(reinterpret_cast<int64_t>(memory));
  std::free(memory);
}

struct Memory final : public c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes ? std::malloc(bytes) : nullptr;
    if (listening && memory)
      listener.allocated(reinterpret_cast<int64_t>(memory), bytes, current_device, current_streams[current_device]);
    return {memory, memory, &free_memory, {kCUDA, current_device}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
};
Memory memory;
REGISTER_ALLOCATOR(kCUDA, &memory)

// Pinned memory is aligned so that is_pinned can be told; its sizes are told as allocations on device -1.
std::map<const void*, size_t> pinned;
struct PinnedMemory final : public c10::Allocator {
  static void release(void* address) {
    pinned.erase(address);
    std::free(address);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* address = std::malloc(bytes ? bytes : 1);
    pinned[address] = bytes;
    if (listening) listener.allocated(reinterpret_cast<int64_t>(address), bytes, -1, 0);
    return {address, address, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
};
PinnedMemory pinned_memory;

struct CUDAHooks final : public at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex current_device() const override { return ::current_device; }
  c10::DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { ::current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(::current_device, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* address) const override {
    auto next = pinned.upper_bound(address);
    if (next == pinned.begin()) return false;
    --next;
    return static_cast<const char*>(address) < static_cast<const char*>(next->first) + next->second;
  }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)  // torch finds it by this name

// What one operator touches.
struct Touched {
  std::vector<int64_t> storages;
  std::unique_ptr<bool[]> writes;
  void tell(const char* name, int device, const std::vector<bool>& written) {
    if (!listening || storages.empty()) return;
    writes.reset(new bool[written.size()]);
    std::copy(written.begin(), written.end(), writes.get());
    listener.ran(name, device, current_streams[device], storages.size(), storages.data(), writes.get());
  }
};

int64_t storage_of(const at::Tensor& tensor) { return reinterpret_cast<int64_t>(tensor.storage().data()); }

at::Tensor made_of(c10::Storage storage, const at::Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return made;
}

void drop_tensor(void* tensor) { delete static_cast<at::Tensor*>(tensor); }

// One operator's arguments as tensors of the CPU, on the same memory.
class OnHost {
 public:
  at::Tensor take(const at::Tensor& tensor, bool written) {
    if (!tensor.defined() || !tensor.is_cuda()) {
      host |= tensor.defined() && tensor.dim() > 0;
      return tensor;
    }
    TORCH_CHECK(device < 0 || device == tensor.get_device(), "Expected all tensors to be on the same device, but found cuda:",
                device, " and cuda:", int(tensor.get_device()));
    device = tensor.get_device();
    if (written && tensor.numel() == 0) {  // what out= names, to be made as large as the result
      auto grows = at::detail::empty_cpu(tensor.sizes(), tensor.scalar_type());
      taken_.emplace_back(tensor, grows);
      return grows;
    }
    auto found = storages_.find(storage_of(tensor));
    if (found == storages_.end()) {
      c10::DataPtr data(tensor.storage().mutable_data(), new at::Tensor(tensor), &drop_tensor, c10::DeviceType::CPU);
      c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), nullptr, false);
      found = storages_.emplace(storage_of(tensor), storage).first;
    }
    auto alias = made_of(found->second, tensor, c10::DispatchKey::CPU);
    taken_.emplace_back(tensor, alias);
    if (storage_of(tensor)) {
      touched.storages.push_back(storage_of(tensor));
      written_.push_back(written);
    }
    return alias;
  }
  // A result: an argument again, a view of one, or a new tensor on the device.
  at::Tensor give(const at::Tensor& result, int on) {
    if (!result.defined() || result.is_cuda()) return result;
    for (auto& [original, alias] : taken_) {
      if (alias.is_same(result)) {
        if (original.numel() == 0 && result.numel()) {
          auto made = on_device(result, on);
          original.unsafeGetTensorImpl()->set_storage_keep_dtype(made.storage());
          original.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides());
        }
        return original;
      }
      if (alias.storage().is_alias_of(result.storage())) return made_of(original.storage(), result, c10::DispatchKey::CUDA);
    }
    return on_device(result, on);
  }
  at::Tensor on_device(const at::Tensor& result, int on) {
    c10::DeviceGuard there(c10::Device(kCUDA, on));
    auto data = memory.allocate(result.storage().nbytes());
    if (result.storage().nbytes()) std::memcpy(data.get(), result.storage().data(), result.storage().nbytes());
    c10::Storage storage(c10::Storage::use_byte_size_t(), result.storage().nbytes(), std::move(data), &memory, true);
    auto made = made_of(storage, result, c10::DispatchKey::CUDA);
    if (storage_of(made)) {
      touched.storages.push_back(storage_of(made));
      written_.push_back(true);
    }
    return made;
  }
  void tell(const char* name, int on) { touched.tell(name, on, written_); }

  int device = -1;
  bool host = false;
  Touched touched;

 private:
  std::map<int64_t, c10::Storage> storages_;
  std::vector<std::pair<at::Tensor, at::Tensor>> taken_;
  std::vector<bool> written_;
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const auto first = stack->size() - arguments.size();
  OnHost on_host;
  int wanted = -1;
  for (size_t number = 0; number < arguments.size(); ++number) {
    auto& value = (*stack)[first + number];
    const auto* alias = arguments[number].alias_info();
    const bool written = alias && alias->isWrite();
    if (value.isTensor()) {
      value = on_host.take(value.toTensor(), written);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorList()) tensors.push_back(on_host.take(tensor, written));
      value = tensors;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
        tensors.push_back(tensor.has_value() ? std::make_optional(on_host.take(*tensor, written)) : tensor);
      value = tensors;
    } else if (value.isDevice()) {
      wanted = value.toDevice().has_index() ? value.toDevice().index() : current_device;
      value = c10::Device(c10::DeviceType::CPU);
    }
  }
  const std::string name = schema.name();
  TORCH_CHECK(!on_host.host || on_host.device < 0 || name.find("index") != std::string::npos,
              "Expected all tensors to be on the same device, but found cuda:", on_host.device, " and cpu (", name, ")");
  const int device = on_host.device >= 0 ? on_host.device : wanted >= 0 ? wanted : current_device;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const auto results = stack->size() - schema.returns().size();
  for (size_t number = results; number < stack->size(); ++number) {
    auto& value = (*stack)[number];
    if (value.isTensor()) {
      value = on_host.give(value.toTensor(), device);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorList()) tensors.push_back(on_host.give(tensor, device));
      value = tensors;
    }
  }
  if (name != "aten::is_set_to") on_host.tell(name.c_str(), device);  // which looks at no memory
  if (listening && (name == "aten::_local_scalar_dense" || name == "aten::equal" || name == "aten::nonzero"))
    listener.host_waits(name.c_str(), device, current_streams[device]);
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard there(device.value_or(c10::Device(kCUDA, current_device)));
  return at::detail::empty_generic_symint(size, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                          c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard there(device.value_or(c10::Device(kCUDA, current_device)));
  return at::detail::empty_strided_symint_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                                  c10::dtype_or_default(dtype));
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  OnHost source, target;
  auto in = source.take(from, false), out = target.take(to, true);
  out.copy_(in);
  if (source.device >= 0) source.tell("aten::copy_", source.device);
  const bool both = source.device >= 0 && target.device >= 0;
  if (both && source.device != target.device && listening) {  // as CUDA does it: on the source's stream, then the other waits
    auto event = listener.recorded(source.device, current_streams[source.device]);
    listener.waits(target.device, current_streams[target.device], event);
  }
  if (target.device >= 0) target.tell("aten::copy_", target.device);
  const auto& on_cpu = source.device < 0 ? from : to;
  if (!both && listening && on_cpu.numel() && !(non_blocking && on_cpu.is_pinned())) {
    const int device = source.device >= 0 ? source.device : target.device;
    listener.host_waits(source.device >= 0 ? "a copy to the host" : "a copy from the host", device, current_streams[device]);
  }
  return to;
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("set_.source_Storage", &at::native::set_);
  library.impl("set_.source_Storage_storage_offset", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage, int64_t,
               at::IntArrayRef, at::IntArrayRef)>(&at::native::set_storage_cpu_));
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("unfold", &at::native::unfold);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
}
}  // namespace

extern "C" {
void sim_listen(const Listener* to) {
  listening = to != nullptr;
  if (listening) listener = *to;
}
int sim_devices() { return kDevices; }
int sim_device() { return current_device; }
void sim_set_device(int device) { current_device = device; }
int64_t sim_stream(int device) { return current_streams[device]; }
void sim_set_stream(int device, int64_t stream) { current_streams[device] = stream; }
}
