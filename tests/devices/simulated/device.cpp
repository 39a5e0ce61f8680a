// A device for tests: four of them, in host memory of their own, with an RNG, pinned memory and
// counters. It registers itself with PyTorch as PrivateUse1; kernels run on the CPU, on copies.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <unordered_map>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kCount = 4;

thread_local c10::DeviceIndex current = 0;
thread_local bool in_kernel = false;  // a kernel's own copies are nobody's transfers

struct Counters {
  std::atomic<int64_t> synchronizations{0}, host_to_device{0}, device_to_host{0}, kernels{0};
  std::atomic<int64_t> blocking_host_to_device{0}, recorded_streams{0};
} counters;

// ---------------------------------------------------------------- memory

struct Blocks {
  std::mutex mutex;
  std::unordered_map<const void*, std::pair<int, size_t>> device, pinned;
  std::array<int64_t, kCount> bytes{}, peak{};
  std::array<int64_t, kCount> limit = {1L << 40, 1L << 40, 1L << 40, 1L << 40};
  std::atomic<bool> initialized{false};
} blocks;

// A device that was lost fails in every later call, as one does after an assert in a kernel.
std::atomic<bool> lost{false};

void check_alive() {
  if (!lost) return;
  const c10::SourceLocation here = {__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
  throw c10::AcceleratorError(here, 710, "sim error: device-side assert triggered");
}

void free_device(void* pointer) {
  std::lock_guard<std::mutex> lock(blocks.mutex);
  auto found = blocks.device.find(pointer);
  blocks.bytes[found->second.first] -= found->second.second;
  blocks.device.erase(found);
  std::free(pointer);
}

void free_pinned(void* pointer) {
  std::lock_guard<std::mutex> lock(blocks.mutex);
  blocks.pinned.erase(pointer);
  std::free(pointer);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device device(kType, current);
    blocks.initialized = true;
    if (size == 0) return {nullptr, nullptr, &free_device, device};
    void* pointer = nullptr;
    std::lock_guard<std::mutex> lock(blocks.mutex);
    TORCH_CHECK_WITH(OutOfMemoryError,
                     blocks.bytes[current] + static_cast<int64_t>(size) <= blocks.limit[current] &&
                         posix_memalign(&pointer, 64, size) == 0,
                     "sim out of memory. Tried to allocate ", size, " bytes");
    blocks.device[pointer] = {current, size};
    blocks.bytes[current] += size;
    blocks.peak[current] = std::max(blocks.peak[current], blocks.bytes[current]);
    return {pointer, pointer, &free_device, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
  bool initialized() override { return blocks.initialized; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    std::lock_guard<std::mutex> lock(blocks.mutex);
    for (auto* stat : {&stats.allocated_bytes, &stats.reserved_bytes}) {
      (*stat)[0].current = blocks.bytes[index];
      (*stat)[0].peak = blocks.peak[index];
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override {
    std::lock_guard<std::mutex> lock(blocks.mutex);
    blocks.peak[index] = blocks.bytes[index];
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &free_pinned, c10::Device(c10::kCPU)};
    void* pointer = nullptr;
    TORCH_CHECK(posix_memalign(&pointer, 64, size) == 0, "out of host memory");
    std::lock_guard<std::mutex> lock(blocks.mutex);
    blocks.pinned[pointer] = {0, size};
    return {pointer, pointer, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;
REGISTER_ALLOCATOR(kType, &device_allocator);

// ---------------------------------------------------------------- RNG

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex index)
      : GeneratorImpl({kType, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->set_state(*get_state());
    return copy;
  }
  at::Generator inner;
};

at::Generator& default_generator(c10::DeviceIndex index) {
  static std::array<at::Generator, kCount> generators = [] {
    std::array<at::Generator, kCount> made;
    for (int i = 0; i < kCount; ++i) made[i] = at::make_generator<DeviceGenerator>(i);
    return made;
  }();
  return generators.at(index < 0 ? current : index);
}

// ---------------------------------------------------------------- what PyTorch asks a device

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return blocks.initialized; }
  c10::DeviceIndex deviceCount() const override { return kCount; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current, index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(index < 0 ? current : index);
  }
  at::Device getDeviceFromPtr(void* pointer) const override {
    std::lock_guard<std::mutex> lock(blocks.mutex);
    return {kType, static_cast<c10::DeviceIndex>(blocks.device.at(pointer).first)};
  }
  bool isPinnedPtr(const void* pointer) const override {
    std::lock_guard<std::mutex> lock(blocks.mutex);
    for (const auto& [start, block] : blocks.pinned) {
      const auto* first = static_cast<const char*>(start);
      if (pointer >= first && pointer < first + block.second) return true;
    }
    return false;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), size);
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static void waited() {
    check_alive();
    ++counters.synchronizations;
  }
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kType, std::exchange(current, device.index())};
  }
  c10::Device getDevice() const override { return {kType, current}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kCount, "there is no device ", device, ": there are ", kCount);
    if (device.has_index()) current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  // Work is done when its call returns, so one stream a device is all of them.
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getStream(device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return kCount; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { waited(); }
  void synchronizeDevice(const c10::DeviceIndex) const override { waited(); }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    static int recorded;
    *event = &recorded;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    check_alive();
    return true;
  }
  void synchronizeEvent(void*) const override { waited(); }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
const bool hooks_registered = [] {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

// ---------------------------------------------------------------- kernels

at::Tensor on_host(const at::Tensor& tensor) {
  auto options = tensor.options().device(c10::kCPU).requires_grad(false);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  check_alive();
  if (!in_kernel && source.is_cpu() != target.is_cpu()) {
    const bool waits = !non_blocking || !(source.is_cpu() ? source : target).is_pinned();
    ++(source.is_cpu() ? counters.host_to_device : counters.device_to_host);
    if (source.is_cpu()) counters.blocking_host_to_device += waits;
    else counters.synchronizations += waits;
  }
  on_host(target).copy_(source.is_cpu() ? source : on_host(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  const_cast<at::Tensor&>(target).resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  counters.synchronizations += !in_kernel;
  return on_host(tensor).item();
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, int64_t offset,
                        c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(tensor, std::move(storage), offset, size, stride);
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  const int64_t count = storage.nbytes() / tensor.dtype().itemsize();
  return at::native::set_storage_cpu_(tensor, std::move(storage), 0, {count}, {});
}

at::Tensor view(const at::Tensor& tensor, c10::IntArrayRef size) {
  return at::native::view(tensor, size);
}

// Its schema does not say that it changes the running statistics, so copies would lose that.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& mean,
    const std::optional<at::Tensor>& variance, bool training, double momentum, double eps) {
  auto host = [](const std::optional<at::Tensor>& tensor) {
    return tensor && tensor->defined() ? std::optional(on_host(*tensor)) : std::nullopt;
  };
  auto [output, saved_mean, saved_scale] =
      at::native_batch_norm(on_host(input.contiguous()), host(weight), host(bias), host(mean),
                            host(variance), training, momentum, eps);
  const bool before = std::exchange(in_kernel, true);
  auto outputs = std::make_tuple(output.to(input.device()), saved_mean.to(input.device()),
                                 saved_scale.to(input.device()));
  in_kernel = before;
  ++counters.kernels;
  return outputs;
}

// Everything else: on copies in host memory. What draws random numbers draws the device's.
void run_on_copies(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_alive();
  c10::DeviceIndex index = current;
  const auto count = op.schema().arguments().size();
  for (auto& value : torch::jit::last(*stack, count)) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_privateuseone()) {
      index = value.toTensor().device().index();
      break;
    }
  }
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isGenerator() && value.toGenerator().device().is_privateuseone()) {
      value = static_cast<DeviceGenerator*>(value.toGenerator().unsafeGetGeneratorImpl())->inner;
    }
  }
  ++counters.kernels;
  const bool before = std::exchange(in_kernel, true);
  const bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  auto* host = at::detail::getDefaultCPUGenerator().unsafeGetGeneratorImpl();
  auto* own = default_generator(index).unsafeGetGeneratorImpl();
  auto saved = draws ? host->get_state() : c10::intrusive_ptr<c10::TensorImpl>();
  if (draws) host->set_state(*own->get_state());
  auto restore = [&] {
    in_kernel = before;
    if (!draws) return;
    own->set_state(*host->get_state());
    host->set_state(*saved);
  };
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    restore();
    throw;
  }
  restore();
}

// There is one stream, so that memory is free for others as soon as its last user is queued.
void record_stream(at::Tensor&, c10::Stream) { ++counters.recorded_streams; }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("record_stream", &record_stream);
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("native_batch_norm", &batch_norm);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &view);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_copies>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
}

// ---------------------------------------------------------------- for the module in Python

c10::GeneratorImpl* generator_of(int64_t index) {
  return default_generator(static_cast<c10::DeviceIndex>(index)).unsafeGetGeneratorImpl();
}

at::Tensor rng_state(int64_t index) { return at::Tensor(generator_of(index)->get_state()); }

void set_rng_state(const at::Tensor& state, int64_t index) {
  generator_of(index)->set_state(*state.unsafeGetTensorImpl());
}

void manual_seed(int64_t seed, int64_t index) {
  generator_of(index)->set_current_seed(static_cast<uint64_t>(seed));
}

std::vector<int64_t> counts() {
  return {counters.synchronizations, counters.host_to_device, counters.device_to_host,
          counters.blocking_host_to_device, counters.kernels, counters.recorded_streams};
}

void limit_memory(int64_t bytes, int64_t index) {
  std::lock_guard<std::mutex> lock(blocks.mutex);
  blocks.limit.at(index) = bytes;
}

int64_t memory_limit(int64_t index) {
  std::lock_guard<std::mutex> lock(blocks.mutex);
  return blocks.limit.at(index);
}

// The tensor's memory as a CPU tensor, which a process group communicates.
at::Tensor host_alias(const at::Tensor& tensor) { return on_host(tensor); }

TORCH_LIBRARY(simulated, m) {
  m.def("rng_state(int index) -> Tensor", &rng_state);
  m.def("set_rng_state(Tensor state, int index) -> ()", &set_rng_state);
  m.def("manual_seed(int seed, int index) -> ()", &manual_seed);
  m.def("counts() -> int[]", &counts);
  m.def("limit_memory(int bytes, int index) -> ()", &limit_memory);
  m.def("memory_limit(int index) -> int", &memory_limit);
  m.def("lose() -> ()", [] { lost = true; });
  m.def("is_initialized() -> bool", [] { return blocks.initialized.load(); });
  m.def("host_alias(Tensor tensor) -> Tensor", &host_alias);
}

}  // namespace
