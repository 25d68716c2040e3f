// A CUDA backend without CUDA: tensors of device "cuda" whose memory is the host's, counted and capped as a card's is.
//
// PyTorch's CPU build has the whole CUDA dispatch key, autograd and autocast; what it lacks are the kernels, the
// allocator, the device guard and the hooks. Here every operation is answered by the CPU's kernel on the same bytes.
// Not answered: anything that only libtorch_cuda or a library of NVIDIA's computes (flash attention, cuDNN, Triton).
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

using at::Tensor;
using c10::Device;
using c10::DeviceType;
using c10::DispatchKeySet;
using c10::IValue;

namespace {

constexpr int CARDS_MAX = 16;
constexpr int64_t BLOCK_BYTES = 512;        // kMinBlockSize of CUDACachingAllocator.h
constexpr int64_t SEGMENT_BYTES = 2 << 20;  // kSmallBuffer
constexpr int64_t CONTEXT_BYTES = 752 << 20;      // of every process, as on an H100 (tests/gpu/measured)
constexpr int64_t COMMUNICATOR_BYTES = 400 << 20;  // of every group that nccl serves

int64_t rounded(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }

std::string amount(int64_t bytes) {  // format_size of CUDACachingAllocator.cpp
  char text[64];
  if (bytes <= 1024) snprintf(text, sizeof text, "%ld bytes", (long)bytes);
  else if (bytes <= 1 << 20) snprintf(text, sizeof text, "%.2f KiB", bytes / 1024.0);
  else if (bytes <= 1 << 30) snprintf(text, sizeof text, "%.2f MiB", bytes / 1048576.0);
  else snprintf(text, sizeof text, "%.2f GiB", bytes / 1073741824.0);
  return text;
}

// What cudaMemGetInfo and the caching allocator know of one card. No fragmentation: what is free is reused whole.
struct Card {
  std::mutex mutex;
  int64_t total = 0, others = 0, context = 0;  // bytes; `others` of other processes, `context` of this one's
  double fraction = 1.0;
  int64_t allocated = 0, reserved = 0, allocated_peak = 0, reserved_peak = 0, allocations = 0, frees = 0, ooms = 0;
  int64_t retries = 0;

  int64_t free_bytes() const { return std::max<int64_t>(total - others - context - reserved, 0); }

  void grow(int index, int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    bytes = rounded(bytes, BLOCK_BYTES);
    const int64_t needed = rounded(allocated + bytes, SEGMENT_BYTES);
    if (needed > reserved) {
      const int64_t allowed = fraction * total;
      if (needed > allowed || needed > total - others - context) {
        retries++;
        reserved = rounded(allocated, SEGMENT_BYTES);  // the cache is given back before the error
        ooms++;
        fail(index, bytes, allowed);
      }
      reserved = needed;
    }
    allocated += bytes;
    allocations++;
    allocated_peak = std::max(allocated_peak, allocated);
    reserved_peak = std::max(reserved_peak, reserved);
  }

  void shrink(int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    allocated -= rounded(bytes, BLOCK_BYTES);
    frees++;
  }

  // The message of CUDACachingAllocator.cpp, 2.13.
  [[noreturn]] void fail(int index, int64_t bytes, int64_t allowed) {
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", amount(bytes), ". GPU ", index,
        " has a total capacity of ", amount(total), " of which ", amount(free_bytes()), " is free. ",
        "Including non-PyTorch memory, this process has ", amount(context + reserved), " memory in use. ",
        fraction < 1.0 ? amount(allowed) + " allowed; " : "", "Of the allocated memory ", amount(allocated),
        " is allocated by PyTorch, and ", amount(reserved - allocated), " is reserved by PyTorch but unallocated. ",
        "If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation. See documentation for Memory Management "
        "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)");
    std::abort();
  }
};

Card cards[CARDS_MAX];
thread_local int current = 0;

// Devices of NVIDIA_FAKE_STATE (fake_nvml/nvml.c) that CUDA_VISIBLE_DEVICES leaves; `add` is false to read what others hold.
int load(bool add) {
  std::vector<std::pair<int64_t, int64_t>> there;
  const char* path = getenv("NVIDIA_FAKE_STATE");
  FILE* file = path ? fopen(path, "r") : nullptr;
  char line[512];
  if (!file) return 0;
  const bool is_ok = fgets(line, sizeof line, file) && strncmp(line, "ok", 2) == 0;
  long long total, used;
  while (is_ok && fgets(line, sizeof line, file) && sscanf(line, "%lld %lld", &total, &used) == 2)
    there.emplace_back(total << 20, used << 20);
  fclose(file);
  std::vector<int> visible;
  if (const char* told = getenv("CUDA_VISIBLE_DEVICES")) {
    std::stringstream parts(told);
    for (std::string part; std::getline(parts, part, ',');) {  // as CUDA: what follows an unknown one is not there
      char* end;
      const long index = strtol(part.c_str(), &end, 10);
      if (end == part.c_str() || index < 0 || index >= (long)there.size()) break;
      visible.push_back(index);
    }
  } else {
    for (size_t i = 0; i < there.size(); i++) visible.push_back(i);
  }
  for (size_t i = 0; i < visible.size() && i < CARDS_MAX; i++) {
    if (add) {
      cards[i].total = there[visible[i]].first;
      cards[i].context = CONTEXT_BYTES;
    }
    cards[i].others = there[visible[i]].second;
  }
  return std::min<int>(visible.size(), CARDS_MAX);
}

int count() {
  static const int known = load(true);
  return known;
}

// ---- memory

struct Held {  // bytes of a card, which host memory stands for
  int index;
  int64_t bytes;
  c10::DataPtr memory;
  c10::Storage storage;  // instead of `memory`, where a CPU kernel has made it
  ~Held() { cards[index].shrink(bytes); }
};

void let_go(void* context) { delete static_cast<Held*>(context); }

c10::DataPtr on_card(int index, int64_t bytes, c10::DataPtr memory, c10::Storage storage) {
  void* data = storage ? storage.mutable_data() : memory.get();
  if (bytes == 0) return c10::DataPtr(nullptr, Device(c10::kCUDA, index));
  cards[index].grow(index, bytes);
  return {data, new Held{index, bytes, std::move(memory), std::move(storage)}, &let_go, Device(c10::kCUDA, index)};
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    cards[current].grow(current, bytes);  // before the host is asked: nobody may touch what the card does not have
    cards[current].shrink(bytes);
    return on_card(current, bytes, c10::GetCPUAllocator()->allocate(bytes), {});
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
} allocator;

std::mutex pinned_mutex;
std::map<uintptr_t, size_t> pinned;  // address -> bytes

void pin(const void* data, size_t bytes) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned[(uintptr_t)data] = bytes;
}

bool unpin(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  return pinned.erase((uintptr_t)data) > 0;
}

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned.upper_bound((uintptr_t)data);
  return after != pinned.begin() && (uintptr_t)data < std::prev(after)->first + std::prev(after)->second;
}

struct Pinned {
  c10::DataPtr memory;
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr memory = c10::GetCPUAllocator()->allocate(bytes);
    void* data = memory.get();
    pin(data, bytes);
    return {data, new Pinned{std::move(memory)}, &let_go_pinned, Device(c10::kCPU)};
  }
  static void let_go_pinned(void* context) {
    auto* held = static_cast<Pinned*>(context);
    unpin(held->memory.get());
    delete held;
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
} pinned_allocator;

// ---- devices, streams and events: everything is done when the call returns

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static thread_local int64_t streams[CARDS_MAX];

  DeviceType type() const override { return c10::kCUDA; }
  Device exchangeDevice(Device device) const override {
    Device old(c10::kCUDA, current);
    setDevice(device);
    return old;
  }
  Device getDevice() const override { return Device(c10::kCUDA, current); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < count(), "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Stream getStream(Device device) const override {
    const int index = device.index() < 0 ? current : device.index();
    return c10::Stream(c10::Stream::UNSAFE, Device(c10::kCUDA, index), streams[index]);
  }
  c10::Stream getDefaultStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(Device device, int) const override {
    static std::atomic<int64_t> next{1};
    return c10::Stream(c10::Stream::UNSAFE, Device(c10::kCUDA, device.index() < 0 ? current : device.index()), next++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream old = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return old;
  }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  c10::DeviceIndex deviceCount() const noexcept override { return count(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 1e-3; }
};
thread_local int64_t Guard::streams[CARDS_MAX];

// Random numbers come from CPU kernels: a card's default generator is the host's, others are the host's by another name.
struct Generator final : at::CPUGeneratorImpl {
  Generator(int index, uint64_t seed) : at::CPUGeneratorImpl(seed) {
    device_ = Device(c10::kCUDA, index);
    key_set_ = DispatchKeySet(c10::DispatchKey::CUDA);
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return count() > 0; }
  bool hasCUDA() const override { return count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index, c10::default_rng_seed_val);
  }
  Device getDeviceFromPtr(void*) const override { return Device(c10::kCUDA, current); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  int getNumGPUs() const override { return count(); }
  c10::DeviceIndex deviceCount() const override { return count(); }
  c10::DeviceIndex current_device() const override { return current; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current, index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current : std::exchange(current, index);
  }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  std::string showConfig() const override { return "a card that is not there"; }
};

// ---- operations

// CPU tensors on the bytes of a card's, for one call; what the call made or moved is brought back.
struct Call {
  std::unordered_map<c10::StorageImpl*, c10::Storage> to_host;  // a card's storage -> the host's name for it
  std::unordered_map<c10::StorageImpl*, c10::Storage> to_card;
  std::unordered_map<c10::TensorImpl*, Tensor> original;
  std::vector<Tensor> hosts;  // keep the keys of `original` alive
  std::unordered_set<c10::StorageImpl*> given;  // storages of CPU tensors among the arguments
  int index = -1;
  bool mixed = false;

  Tensor host(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      if (tensor.is_cpu() && tensor.has_storage()) {
        given.insert(tensor.storage().unsafeGetStorageImpl());
        mixed |= tensor.dim() > 0;
      }
      return tensor;
    }
    if (index < 0) index = tensor.get_device();
    TORCH_CHECK(index == tensor.get_device(), "Expected all tensors to be on the same device, but found at least two devices, cuda:",
                index, " and cuda:", tensor.get_device(), "!");
    c10::Storage& storage = to_host[tensor.storage().unsafeGetStorageImpl()];
    if (!storage) {
      const c10::Storage& real = tensor.storage();
      c10::DataPtr data(const_cast<void*>(real.data()), new c10::Storage(real),
                        [](void* context) { delete static_cast<c10::Storage*>(context); }, Device(c10::kCPU));
      storage = c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), real.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
      to_card.emplace(storage.unsafeGetStorageImpl(), real);
    }
    Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    shape(alias, tensor);
    if (tensor.is_conj()) alias._set_conj(true);
    if (tensor.is_neg()) alias._set_neg(true);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
    original.emplace(alias.unsafeGetTensorImpl(), tensor);
    hosts.push_back(alias);
    return alias;
  }

  static void shape(const Tensor& tensor, const Tensor& like) {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  }

  // out= tensors that the kernel has resized
  void settle() {
    for (auto& [real, storage] : to_host) {
      if (storage.data() == real->data() && storage.nbytes() == real->nbytes()) continue;
      auto size = storage.nbytes();
      c10::Storage moved = c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), size, storage.set_data_ptr(c10::DataPtr(nullptr, Device(c10::kCPU))),
          nullptr, false);
      real->set_data_ptr(on_card(index, size, {}, std::move(moved)));
      real->set_nbytes(size);
    }
    for (const Tensor& alias : hosts) {
      const Tensor& tensor = original.at(alias.unsafeGetTensorImpl());
      if (alias.sizes() != tensor.sizes() || alias.strides() != tensor.strides()) shape(tensor, alias);
    }
  }

  Tensor card(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu() || !tensor.has_storage()) return tensor;
    auto known = original.find(tensor.unsafeGetTensorImpl());
    if (known != original.end()) return known->second;
    c10::StorageImpl* made = tensor.storage().unsafeGetStorageImpl();
    if (index < 0 || given.count(made)) return tensor;
    c10::Storage& storage = to_card[made];
    if (!storage)
      storage = c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), made->nbytes(),
          on_card(index, made->nbytes(), {}, tensor.storage()), &allocator, true);
    Tensor result = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), DispatchKeySet(c10::DispatchKey::CUDA), tensor.dtype());
    shape(result, tensor);
    if (tensor.is_conj()) result._set_conj(true);
    if (tensor.is_neg()) result._set_neg(true);
    return result;
  }
};

IValue host_value(Call& call, const IValue& value) {
  if (value.isTensor()) return call.host(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(call.host(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::make_optional(call.host(*tensor)) : std::nullopt);
    return list;
  }
  if (value.isDevice() && value.toDevice().is_cuda()) {
    if (call.index < 0) call.index = value.toDevice().has_index() ? value.toDevice().index() : current;
    return Device(c10::kCPU);
  }
  return value;
}

IValue card_value(Call& call, const IValue& value) {
  if (value.isTensor()) return call.card(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(call.card(tensor));
    return list;
  }
  return value;
}

// Operations that take tensors of the host beside a card's.
bool takes_both(const std::string& name) {
  static const std::unordered_set<std::string> names{
      "aten::copy_", "aten::_copy_from", "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put",
      "aten::_unsafe_index", "aten::set_", "aten::_foreach_copy_", "aten::_amp_foreach_non_finite_check_and_unscale_"};
  return names.count(name) > 0;
}

// Products that a card adds up in fp32, as the host's kernels for 16 bits do too, at a sixtieth of fp32's speed.
bool adds_up_in_fp32(const std::string& name) {
  static const std::unordered_set<std::string> names{"aten::mm",     "aten::addmm",       "aten::bmm",
                                                     "aten::baddbmm", "aten::convolution", "aten::convolution_backward"};
  return names.count(name) > 0;
}

at::ScalarType narrow_type(const torch::jit::Stack& stack, size_t first) {  // of the tensors; Undefined where none is
  for (size_t i = first; i < stack.size(); i++)
    if (stack[i].isTensor() && stack[i].toTensor().defined() && at::isReducedFloatingType(stack[i].toTensor().scalar_type()))
      return stack[i].toTensor().scalar_type();
  return at::ScalarType::Undefined;
}

void change_type(torch::jit::Stack& stack, size_t first, at::ScalarType type) {
  for (size_t i = first; i < stack.size(); i++)
    if (stack[i].isTensor() && stack[i].toTensor().defined()) stack[i] = stack[i].toTensor().to(type);
}

// A card's softmax takes 16 bits and gives 32 in one step, and its backward pass the other way: the host's takes 32.
at::ScalarType widen(const std::string& name, torch::jit::Stack& stack, size_t first) {
  at::ScalarType narrow = adds_up_in_fp32(name) ? narrow_type(stack, first) : at::ScalarType::Undefined;
  if ((name == "aten::_softmax" || name == "aten::_log_softmax") && stack[first + 2].toBool()) {
    stack[first] = stack[first].toTensor().to(at::kFloat);
    stack[first + 2] = false;
  } else if (name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data") {
    narrow = at::ScalarType(stack[first + 3].toInt());
    if (narrow == stack[first].toTensor().scalar_type()) return at::ScalarType::Undefined;
    stack[first + 3] = int64_t(at::kFloat);
  }
  if (narrow != at::ScalarType::Undefined) change_type(stack, first, at::kFloat);
  return narrow;
}

void answer(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t taken = schema.arguments().size(), first = stack->size() - taken;
  Call call;
  std::optional<at::Generator> generator;
  for (size_t i = first; i < stack->size(); i++) {
    IValue& value = (*stack)[i];
    if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
      generator = value.toGenerator();
      at::Generator host = at::make_generator<at::CPUGeneratorImpl>();
      host.set_state(generator->get_state());
      value = host;
      continue;
    }
    value = host_value(call, value);
  }
  TORCH_CHECK(!call.mixed || call.index < 0 || takes_both(schema.name()),
              "Expected all tensors to be on the same device, but found at least two devices, cuda:", call.index,
              " and cpu! (", schema.name(), ")");
  std::optional<at::Generator> host_generator;
  if (generator)
    for (size_t i = first; i < stack->size(); i++)
      if ((*stack)[i].isGenerator()) host_generator = (*stack)[i].toGenerator();
  {
    at::AutoDispatchBelowADInplaceOrView below;
    const Tensor out = schema.overload_name() == "out" ? stack->back().toTensor() : Tensor();
    const at::ScalarType narrow = widen(schema.name(), *stack, first);
    op.redispatchBoxed(DispatchKeySet(c10::DispatchKey::CPU), stack);
    if (narrow != at::ScalarType::Undefined && out.defined()) stack->back() = out.copy_(stack->back().toTensor());
    else if (narrow != at::ScalarType::Undefined) change_type(*stack, first, narrow);
  }
  if (generator && host_generator) generator->set_state(host_generator->get_state());
  call.settle();
  const size_t given = schema.returns().size();
  for (size_t i = stack->size() - given; i < stack->size(); i++) (*stack)[i] = card_value(call, (*stack)[i]);
}

int index_of(std::optional<Device> device) { return device && device->has_index() ? device->index() : current; }

struct Current {  // the device that `allocator` takes from, for a moment
  int old;
  explicit Current(int index) : old(std::exchange(current, index)) {}
  ~Current() { current = old; }
};

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  Current at_device(index_of(device));
  return at::detail::empty_generic(size, &allocator, DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(type), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> type,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  Current at_device(index_of(device));
  return at::detail::empty_strided_generic(size, stride, &allocator, DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(type));
}

void resize_storage(const c10::Storage& storage, int64_t bytes) {
  Current at_device(storage.device().index());
  c10::DataPtr data = allocator.allocate(bytes);
  if (const auto kept = std::min<int64_t>(bytes, storage.nbytes())) std::memcpy(data.get(), storage.data(), kept);
  storage.set_data_ptr(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

void fit(const Tensor& self) {
  int64_t last = self.storage_offset() + (self.numel() ? 1 : 0);
  for (int64_t i = 0; i < self.dim(); i++) last += self.numel() ? (self.size(i) - 1) * self.stride(i) : 0;
  const int64_t needed = last * self.element_size();
  if (self.numel() && needed > (int64_t)self.storage().nbytes()) resize_storage(self.storage(), needed);
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes() != size) self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  fit(self);
  return self;
}

Tensor& set_storage_(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  std::vector<int64_t> strides(stride.vec());
  if (strides.size() != size.size()) {
    strides.assign(size.size(), 1);
    for (int64_t i = (int64_t)size.size() - 2; i >= 0; i--) strides[i] = strides[i + 1] * std::max<int64_t>(size[i + 1], 1);
  }
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, strides, offset);
  fit(self);
  return self;
}

Tensor& set_source_(Tensor& self, c10::Storage source) {
  const int64_t count = source.nbytes() / self.element_size();
  return set_storage_(self, std::move(source), 0, {count}, {});
}

Tensor& set_tensor_(Tensor& self, const Tensor& source) {
  return set_storage_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(Tensor&, c10::Stream) {}

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
REGISTER_ALLOCATOR(c10::kCUDA, &allocator)

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&answer>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage_);
  m.impl("set_.source_Storage", &set_source_);
  m.impl("set_.source_Tensor", &set_tensor_);
  m.impl("record_stream", &record_stream);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  // Composite for the other backends: what they do inside asks for the kind of device.
  for (const char* name : {"copy_", "convolution_overrideable", "convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&answer>());
}

// ---- nccl, answered by gloo

namespace {

using c10d::Work;

struct Done final : Work {
  explicit Done(std::vector<Tensor> tensors) : Work(-1, c10d::OpType::UNKNOWN), tensors_(std::move(tensors)) {
    future_ = c10::make_intrusive<at::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future_->markCompleted(IValue(tensors_));
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::vector<Tensor> result() override { return tensors_; }
  std::vector<Tensor> tensors_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

Tensor on_host(const Tensor& tensor) {  // which outlives the call; gloo does not know booleans
  TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type cpu: nccl takes tensors of cards only");
  const c10::Storage& real = tensor.storage();
  c10::DataPtr data(const_cast<void*>(real.data()), new c10::Storage(real),
                    [](void* context) { delete static_cast<c10::Storage*>(context); }, Device(c10::kCPU));
  c10::Storage storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), real.nbytes(), std::move(data), nullptr, false);
  auto type = tensor.scalar_type() == at::kBool ? at::kByte : tensor.scalar_type();
  Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(type));
  Call::shape(alias, tensor);
  return alias;
}

std::vector<Tensor> on_host(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> aliases;
  for (const Tensor& tensor : tensors) aliases.push_back(on_host(tensor));
  return aliases;
}

std::vector<std::vector<Tensor>> on_host(const std::vector<std::vector<Tensor>>& lists) {
  std::vector<std::vector<Tensor>> aliases;
  for (const auto& list : lists) aliases.push_back(on_host(list));
  return aliases;
}

std::vector<Tensor> flat(const std::vector<std::vector<Tensor>>& lists) {
  std::vector<Tensor> all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

bool is_mean(const c10d::ReduceOp& op) { return op == c10d::ReduceOp::AVG; }

struct Nccl final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  bool coalescing = false;

  explicit Nccl(c10::intrusive_ptr<c10d::Backend> with)
      : Backend(with->getRank(), with->getSize()), gloo(std::move(with)) {
    if (getSize() > 1 && current < count()) cards[current].context += COMMUNICATOR_BYTES;
  }
  ~Nccl() override {
    if (getSize() > 1 && current < count()) cards[current].context -= COMMUNICATOR_BYTES;
  }

  using Ptr = c10::intrusive_ptr<Work>;

  static Ptr done(const Ptr& work, std::vector<Tensor> tensors) {
    work->wait();
    return c10::make_intrusive<Done>(std::move(tensors));
  }
  template <class Options>
  Options sums(Options options) const {
    if (is_mean(options.reduceOp)) options.reduceOp = c10d::ReduceOp::SUM;
    return options;
  }
  void average(std::vector<Tensor> hosts, const c10d::ReduceOp& op) const {
    at::AutoDispatchBelowADInplaceOrView below;
    if (is_mean(op))
      for (Tensor& host : hosts) host.div_(getSize());
  }

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {}
  Ptr endCoalescing() override { return c10::make_intrusive<Done>(std::vector<Tensor>{}); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }

  Ptr broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    auto hosts = on_host(tensors);
    return done(gloo->broadcast(hosts, options), tensors);
  }
  Ptr allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    auto hosts = on_host(tensors);
    gloo->allreduce(hosts, sums(options))->wait();
    average(hosts, options.reduceOp);
    return c10::make_intrusive<Done>(tensors);
  }
  Ptr allreduce_coalesced(std::vector<Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    c10d::AllreduceOptions each;
    each.reduceOp = options.reduceOp;
    for (Tensor& tensor : tensors) {
      std::vector<Tensor> one{tensor};
      allreduce(one, each);
    }
    return c10::make_intrusive<Done>(tensors);
  }
  Ptr reduce(std::vector<Tensor>& tensors, const c10d::ReduceOptions& options) override {
    auto hosts = on_host(tensors);
    gloo->reduce(hosts, sums(options))->wait();
    if (getRank() == options.rootRank) average(hosts, options.reduceOp);
    return c10::make_intrusive<Done>(tensors);
  }
  Ptr allgather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs,
                const c10d::AllgatherOptions& options) override {
    auto from = on_host(inputs);
    auto to = on_host(outputs);
    return done(gloo->allgather(to, from, options), flat(outputs));
  }
  Ptr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensor to = on_host(output), from = on_host(input);
    at::AutoDispatchBelowADInplaceOrView below;
    from = from.clone();  // the input of FSDP is a part of its output
    return done(gloo->_allgather_base(to, from, options), {output});
  }
  Ptr allgather_into_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                                      const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < outputs.size(); i++) _allgather_base(outputs[i], inputs[i], options);
    return c10::make_intrusive<Done>(outputs);
  }
  Ptr gather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs,
             const c10d::GatherOptions& options) override {
    auto from = on_host(inputs);
    auto to = on_host(outputs);
    return done(gloo->gather(to, from, options), flat(outputs));
  }
  Ptr scatter(std::vector<Tensor>& outputs, std::vector<std::vector<Tensor>>& inputs,
              const c10d::ScatterOptions& options) override {
    auto from = on_host(inputs);
    auto to = on_host(outputs);
    return done(gloo->scatter(to, from, options), outputs);
  }
  Ptr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensor to = on_host(output), from = on_host(input);
    at::AutoDispatchBelowADInplaceOrView below;
    Tensor whole = from.clone();
    std::vector<Tensor> all{whole};
    c10d::AllreduceOptions sum;
    sum.reduceOp = is_mean(options.reduceOp) ? c10d::ReduceOp(c10d::ReduceOp::SUM) : options.reduceOp;
    gloo->allreduce(all, sum)->wait();
    average(all, options.reduceOp);
    to.copy_(whole.view(-1).narrow(0, getRank() * to.numel(), to.numel()).view_as(to));
    return c10::make_intrusive<Done>(std::vector<Tensor>{output});
  }
  Ptr reduce_scatter(std::vector<Tensor>& outputs, std::vector<std::vector<Tensor>>& inputs,
                     const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); i++) {
      std::vector<Tensor> flatted;
      for (const Tensor& part : inputs[i]) flatted.push_back(part.reshape(-1));
      Tensor whole = at::cat(flatted);
      _reduce_scatter_base(outputs[i], whole, options);
    }
    return c10::make_intrusive<Done>(outputs);
  }
  Ptr reduce_scatter_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                                      const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); i++) _reduce_scatter_base(outputs[i], inputs[i], options);
    return c10::make_intrusive<Done>(outputs);
  }
  Ptr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& to_sizes, std::vector<int64_t>& from_sizes,
                    const c10d::AllToAllOptions& options) override {
    Tensor to = on_host(output), from = on_host(input);
    return done(gloo->alltoall_base(to, from, to_sizes, from_sizes, options), {output});
  }
  Ptr send(std::vector<Tensor>& tensors, int rank, int tag) override {
    auto hosts = on_host(tensors);
    return gloo->send(hosts, rank, tag);
  }
  Ptr recv(std::vector<Tensor>& tensors, int rank, int tag) override {
    auto hosts = on_host(tensors);
    return gloo->recv(hosts, rank, tag);
  }
  Ptr barrier(const c10d::BarrierOptions& options) override { return done(gloo->barrier(options), {}); }
};

struct Timer final : c10d::Timer {  // of DistributedDataParallel
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event from, Event to) override {
    const int64_t began = getTimeRef(from), ended = getTimeRef(to);
    return ended < began ? std::nullopt : std::make_optional(ended - began);
  }
};

void answer_nccl(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  auto gloo = group->getBackend(c10::kCPU);
  group->setBackend(c10::kCUDA, c10d::ProcessGroup::BackendType::NCCL, c10::make_intrusive<Nccl>(gloo));
}

}  // namespace

TORCH_LIBRARY(fake_card, m) {
  m.def("answer_nccl(__torch__.torch.classes.c10d.ProcessGroup group) -> ()", &answer_nccl);
  m.def("resize_(Storage storage, int bytes) -> ()", [](c10::Storage storage, int64_t bytes) { resize_storage(storage, bytes); });
}

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, ::Timer)
}  // namespace c10d

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, ::Hooks)
}  // namespace at

// ---- for torch._C, through ctypes

extern "C" {

int card_count(void) { return count(); }
void card_init(void) { at::globalContext().lazyInitDevice(c10::kCUDA); }
int card_current(void) { return current; }
void card_select(int index) { current = index; }
int64_t card_stream(int index) { return Guard().getStream(Device(c10::kCUDA, index)).id(); }
int64_t card_new_stream(int index) { return Guard().getNewStream(Device(c10::kCUDA, index), 0).id(); }
void card_set_stream(int index, int64_t id) { Guard::streams[index] = id; }
void card_pin(const void* data, int64_t bytes) { pin(data, bytes); }
int card_unpin(const void* data) { return unpin(data) ? 0 : 713; }  // cudaErrorHostMemoryNotRegistered
void card_fraction(int index, double fraction) { cards[index].fraction = fraction; }
void card_empty(int index) { cards[index].reserved = rounded(cards[index].allocated, SEGMENT_BYTES); }
void card_reset_peaks(int index) {
  cards[index].allocated_peak = cards[index].allocated;
  cards[index].reserved_peak = cards[index].reserved;
}
void card_stats(int index, int64_t* to) {
  load(false);
  const Card& card = cards[index];
  const int64_t told[] = {card.allocated, card.allocated_peak, card.reserved,  card.reserved_peak, card.allocations,
                          card.frees,     card.ooms,           card.retries,   card.free_bytes(),  card.total};
  std::copy(std::begin(told), std::end(told), to);
}

}  // extern "C"
