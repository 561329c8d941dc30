// CUDA devices for a torch that was built without CUDA: memory that only kernels reach, and kernels that run on the CPU.
//
// torch has a place for each thing that a CUDA build registers. Here are a device guard, hooks, an allocator, `copy_`, and one
// fallback for all other operators. simulated_gpus.py says what the simulation covers.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <unordered_set>

namespace {
using at::Tensor;
using c10::Device;
using c10::IValue;
using c10::Storage;

constexpr auto CPU = c10::DeviceType::CPU;
constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr int MOST = 8;

int devices = 0;
int64_t capacity = 0;  // bytes of each device
thread_local c10::DeviceIndex current = 0;
std::atomic<int64_t> used[MOST], peak[MOST];
// Kernels; times the CPU waits for a device; bytes to a device, from one, and between two.
std::atomic<int64_t> kernels, waits, bytes_up, bytes_down, bytes_across;
std::unordered_set<std::string> take_scalars;  // operators that take a scalar of the CPU beside tensors of a GPU

Device with_index(Device device) { return device.has_index() ? device : Device(CUDA, current); }

void check(Device device) {
  TORCH_CHECK(with_index(device).index() < devices, "CUDA error: invalid device ordinal");
}

// ---- Memory. The storage of a GPU's tensor owns a storage of the CPU, which kernels use. Its own address cannot be read.

struct Block {
  Storage host;
  Device device;
  int64_t size = 0;

  Block(Storage host_, Device device_) : host(std::move(host_)), device(device_) {
    size = static_cast<int64_t>(host.nbytes());
    auto& in_use = used[device.index()];
    TORCH_CHECK_WITH(OutOfMemoryError, in_use + size <= capacity, "CUDA out of memory. Tried to allocate ", size, " bytes. GPU ",
                     static_cast<int>(device.index()), " has a total capacity of ", capacity, " bytes.");
    const int64_t now = in_use += size;
    if (now > peak[device.index()]) peak[device.index()] = now;
  }
  ~Block() { used[device.index()] -= size; }
};

void free_block(void* block) { delete static_cast<Block*>(block); }

void* unreadable(const Storage& host) {  // not an address of x86-64, but one for each
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(host.data()) ^ (uintptr_t{1} << 60));
}

c10::DataPtr pointer_to(Storage host, Device device) {
  void* address = unreadable(host);
  return {address, new Block(std::move(host), device), &free_block, device};
}

Block& block_of(const Storage& storage) {
  const auto& data = storage.data_ptr();
  TORCH_CHECK(data.get_deleter() == &free_block, "simulated GPU: memory from elsewhere");
  return *static_cast<Block*>(data.get_context());
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    Storage host(Storage::use_byte_size_t(), size, c10::GetAllocator(CPU), true);
    return pointer_to(std::move(host), Device(CUDA, current));
  }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "simulated GPU: copy_data"); }
} memory;

// ---- What torch asks of a kind of device: the current one, streams, random numbers. Everything is done at once.

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Stream = c10::Stream;
  using Index = c10::DeviceIndex;
  c10::DeviceType type() const override { return CUDA; }
  Device getDevice() const override { return Device(CUDA, current); }
  void setDevice(Device device) const override {
    check(device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override { current = with_index(device).index(); }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  Index deviceCount() const noexcept override { return static_cast<Index>(devices); }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, with_index(device)); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  bool queryStream(const Stream&) const override { return true; }
  bool queryEvent(void*) const override { return true; }
  void record(void**, const Stream&, const Index, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  void destroyEvent(void*, const Index) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
  void synchronizeStream(const Stream&) const override { ++waits; }
  void synchronizeEvent(void*) const override { ++waits; }
  void synchronizeDevice(const Index) const override { ++waits; }
};

struct Random final : at::CPUGeneratorImpl {
  explicit Random(Device device) { device_ = device; }
  void act_as(Device device) { device_ = device; }
};

at::Generator& random_of(int64_t index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int index = 0; index < MOST; ++index) made.push_back(at::make_generator<Random>(Device(CUDA, index)));
    return made;
  }();
  return all.at(index < 0 ? current : index);
}

struct Hooks final : at::CUDAHooksInterface {
  using Index = c10::DeviceIndex;
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return devices > 0; }
  bool hasPrimaryContext(Index) const override { return true; }
  Index deviceCount() const override { return static_cast<Index>(devices); }
  int getNumGPUs() const override { return devices; }
  Index current_device() const override { return current; }
  Index getCurrentDevice() const override { return current; }
  void setCurrentDevice(Index device) const override { current = device; }
  Index exchangeDevice(Index device) const override { return std::exchange(current, device); }
  Index maybeExchangeDevice(Index device) const override { return device < 0 ? current : exchangeDevice(device); }
  void deviceSynchronize(Index) const override { ++waits; }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(CPU); }
  const at::Generator& getDefaultGenerator(Index index) const override { return random_of(index); }
  at::Generator getNewGenerator(Index index) const override {
    return at::make_generator<Random>(Device(CUDA, index < 0 ? current : index));
  }
};

// ---- Kernels.

// One call of an operator: its tensors as tensors of the CPU on the same memory, and back.
struct Call {
  Device device;
  std::vector<Storage> storages;                 // of the arguments and results; they keep `pairs` alive
  std::vector<std::pair<Tensor, Tensor>> pairs;  // a GPU's tensor, and the CPU's on its memory
  std::vector<Random*> random;

  static Tensor like(const Tensor& tensor, Tensor made) {
    made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    made._set_conj(tensor.is_conj());
    made._set_neg(tensor.is_neg());
    return made;
  }

  Tensor to_host(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    for (auto& [ours, host] : pairs)
      if (ours.is_same(tensor)) return host;
    auto host = like(tensor, at::detail::make_tensor<c10::TensorImpl>(
                                 host_of(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype()));
    pairs.emplace_back(tensor, host);
    return host;
  }

  Tensor to_device(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (auto& [ours, host] : pairs) {
      if (host.is_same(tensor)) return ours;
      if (host.is_alias_of(tensor))  // a view is an inference tensor only if its base is one
        return like(tensor, at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, Storage(ours.storage()), ours.key_set(),
                                                                     tensor.dtype()));
    }
    return like(tensor, at::detail::make_tensor<c10::TensorImpl>(storage_on(tensor.storage()),
                                                                 c10::DispatchKeySet(c10::DispatchKey::CUDA), tensor.dtype()));
  }

  Storage host_of(const Storage& storage) {
    storages.push_back(storage);
    return block_of(storage).host;
  }

  Storage storage_on(const Storage& host) {
    for (auto& storage : storages)
      if (block_of(storage).host.unsafeGetStorageImpl() == host.unsafeGetStorageImpl()) return storage;
    return storages.emplace_back(Storage::use_byte_size_t(), host.nbytes(), pointer_to(host, device), &memory, true);
  }

  // After the kernel: arguments that it has resized, or given another storage.
  void update() {
    for (auto& [ours, host] : pairs) {
      auto* impl = ours.unsafeGetTensorImpl();
      if (block_of(ours.storage()).host.unsafeGetStorageImpl() != host.storage().unsafeGetStorageImpl())
        impl->set_storage_keep_dtype(storage_on(host.storage()));
      auto* storage = ours.storage().unsafeGetStorageImpl();
      if (storage->nbytes() != host.storage().nbytes() || storage->data() != unreadable(host.storage())) {
        Storage kept = host.storage();
        storage->set_data_ptr_noswap(pointer_to(kept, device));
        storage->set_nbytes(kept.nbytes());
      }
      if (ours.sizes() != host.sizes() || ours.strides() != host.strides() || ours.storage_offset() != host.storage_offset())
        impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

  ~Call() {
    for (auto* generator : random) generator->act_as(device);
  }
};

template <class F>
void each_tensor(const IValue& value, F&& use) {
  if (value.isTensor()) use(value.toTensor());
  if (value.isList())
    for (const IValue& item : value.toListRef())
      if (item.isTensor()) use(item.toTensor());
}

template <class F>
IValue converted(const IValue& value, F&& convert) {
  if (value.isTensor()) return convert(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& item : value.toTensorVector()) list.push_back(convert(item));
    return list;
  }
  if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
    c10::List<std::optional<Tensor>> list;
    bool any = false;
    for (const IValue& item : value.toListRef()) {
      any |= item.isTensor();
      list.push_back(item.isTensor() ? std::optional<Tensor>(convert(item.toTensor())) : std::nullopt);
    }
    return any ? IValue(list) : value;
  }
  return value;
}

// The device of an operator: that of all its GPU tensors, or the one that it is asked for.
Device device_of(const std::string& name, c10::ArrayRef<IValue> arguments) {
  std::optional<Device> device;
  for (const IValue& value : arguments)
    each_tensor(value, [&](const Tensor& tensor) {
      if (!tensor.defined() || !tensor.is_cuda()) return;
      TORCH_CHECK(!device || *device == tensor.device(),
                  "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
                  tensor.device(), "! (", name, ")");
      device = tensor.device();
    });
  for (const IValue& value : arguments) {
    if (device) break;
    if (value.isDevice() && value.toDevice().type() == CUDA) device = value.toDevice();
    if (value.isStorage() && value.toStorage().device_type() == CUDA) device = value.toStorage().device();
  }
  TORCH_CHECK(device, "simulated GPU: ", name, " has no argument on a GPU");
  check(*device);
  return with_index(*device);
}

bool among(const std::string& name, std::initializer_list<const char*> names) {
  return std::any_of(names.begin(), names.end(), [&](const char* each) { return name == each; });
}

// Whether the CPU waits for the result of an operator, because its size or value depends on numbers.
bool waits_for(const std::string& name, const Call& call, bool indexing) {
  if (among(name, {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select"})) return true;
  if (name.rfind("aten::_unique", 0) == 0 || name.rfind("aten::unique", 0) == 0) return true;
  return indexing && std::any_of(call.pairs.begin() + 1, call.pairs.end(),
                                 [](const auto& pair) { return pair.second.scalar_type() == at::kBool; });
}

void kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = schema.name();
  const std::string overload = schema.overload_name();
  const std::string full_name = overload.empty() ? name : name + "." + overload;
  const auto count = schema.arguments().size();
  IValue* const arguments = stack->data() + (stack->size() - count);
  Call call{device_of(name, c10::ArrayRef<IValue>(arguments, count))};
  const bool indexing = among(name, {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
                                     "aten::_unsafe_index", "aten::_unsafe_index_put"});
  for (size_t i = 0; i < count; ++i) {
    IValue& value = arguments[i];
    const auto& argument = schema.arguments()[i];
    each_tensor(value, [&](const Tensor& tensor) {
      if (!tensor.defined() || tensor.is_cuda() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return;
      const bool scalar = tensor.is_cpu() && tensor.dim() == 0 && !value.isList() && take_scalars.count(full_name);
      const bool index = tensor.is_cpu() && indexing && argument.name() == "indices";
      TORCH_CHECK(scalar || index, "Expected all tensors to be on the same device, but found at least two devices, ",
                  call.device, " and ", tensor.device(), "! (when checking argument ", argument.name(), " of ", name, ")");
    });
    if (value.isDevice()) {
      value = Device(CPU);
    } else if (value.isStorage()) {
      if (value.toStorage().device_type() == CUDA) value = call.host_of(value.toStorage());
    } else if (value.isGenerator() || (value.isNone() && argument.type()->str() == "Generator?")) {
      auto generator = value.isNone() ? random_of(call.device.index()) : value.toGenerator();
      TORCH_CHECK(generator.device().type() == CUDA, "Expected a 'cuda' device type for generator but found '",
                  generator.device(), "'");
      call.random.push_back(static_cast<Random*>(generator.unsafeGetGeneratorImpl()));
      call.random.back()->act_as(Device(CPU));
      value = generator;
    } else {
      value = converted(value, [&](const Tensor& tensor) { return call.to_host(tensor); });
    }
  }
  // Neither a view nor memory alone.
  bool computes = name.rfind("aten::empty", 0) != 0;
  for (const auto& each : schema.returns()) computes &= !each.alias_info() || each.alias_info()->isWrite();
  kernels += computes;
  waits += waits_for(name, call, indexing);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard plain(
        c10::autocast_dispatch_keyset | c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
    op.callBoxed(stack);
  }
  call.update();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    (*stack)[i] = converted((*stack)[i], [&](const Tensor& tensor) { return call.to_device(tensor); });
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  Call target{self.is_cuda() ? self.device() : source.device()};
  Call origin{source.is_cuda() ? source.device() : self.device()};
  const auto size = static_cast<int64_t>(source.nbytes());
  ++kernels;
  if (!source.is_cuda()) bytes_up += size;
  if (!self.is_cuda()) bytes_down += size, ++waits;
  if (target.device != origin.device) bytes_across += size;
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard plain(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  target.to_host(self).copy_(origin.to_host(source), non_blocking);
  return self;
}

// ---- Operators that the GPU has for dtypes for which the CPU has none.

template <Tensor (*F)(const Tensor&, int64_t, bool)>  // from 16 bits to float32
Tensor softmax(const Tensor& self, int64_t dim, bool half_to_float) {
  if (half_to_float) return F(self.to(at::kFloat), dim, false);
  Call call{self.device()};
  ++kernels;
  return call.to_device(F(call.to_host(self), dim, false));
}

template <Tensor (*F)(const Tensor&, const Tensor&, int64_t, at::ScalarType)>
Tensor softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim, at::ScalarType dtype) {
  Call call{grad.device()};
  ++kernels;
  return call.to_device(F(call.to_host(grad), call.to_host(output), dim, output.scalar_type()).to(dtype));
}

Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {  // of integers
  if (at::isIntegralType(self.scalar_type(), false))
    return at::histc(self.to(at::kFloat), bins, min, max).to(self.scalar_type());
  Call call{self.device()};
  ++kernels;
  return call.to_device(at::histc(call.to_host(self), bins, min, max));
}
}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, ::Hooks)
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("histc", TORCH_FN(histc));
  m.impl("_softmax", TORCH_FN((softmax<at::_softmax>)));
  m.impl("_log_softmax", TORCH_FN((softmax<at::_log_softmax>)));
  m.impl("_softmax_backward_data", TORCH_FN((softmax_backward<at::_softmax_backward_data>)));
  m.impl("_log_softmax_backward_data", TORCH_FN((softmax_backward<at::_log_softmax_backward_data>)));
}
TORCH_LIBRARY(simulated_gpus, m) {
  m.def("start", [](std::vector<std::string> names) {
    take_scalars.insert(names.begin(), names.end());
    c10::SetAllocator(CUDA, &memory, 1);
  });
  m.def("set_up", [](int64_t count, int64_t bytes) {
    TORCH_CHECK(count <= MOST, "at most ", MOST, " simulated GPUs");
    devices = static_cast<int>(count);
    capacity = bytes;
  });
  m.def("device", [] { return static_cast<int64_t>(current); });
  m.def("set_device", [](int64_t index) {
    check(Device(CUDA, static_cast<c10::DeviceIndex>(index)));
    current = static_cast<c10::DeviceIndex>(index);
  });
  m.def("used", [](int64_t index) { return used[index].load(); });
  m.def("peak", [](int64_t index) { return peak[index].load(); });
  m.def("reset_peak", [](int64_t index) { peak[index] = used[index].load(); });
  m.def("wait", [] { ++waits; });
  m.def("seed", [](int64_t index, int64_t seed) { random_of(index).set_current_seed(static_cast<uint64_t>(seed)); });
  m.def("counters", [] { return std::vector<int64_t>{kernels, waits, bytes_up, bytes_down, bytes_across}; });
}
