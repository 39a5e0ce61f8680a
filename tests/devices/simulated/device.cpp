// A device for tests: four of them, in host memory of their own, with an RNG, pinned memory, streams
// and counters. It registers itself with PyTorch as PrivateUse1; kernels run on the CPU, on copies.
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
#include <torch/version.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <unordered_map>

#include "streams.h"

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

thread_local c10::DeviceIndex current = 0;
thread_local bool in_kernel = false;  // a kernel's own copies are nobody's transfers

struct Counters {
  std::atomic<int64_t> synchronizations{0}, host_to_device{0}, device_to_host{0}, kernels{0};
  std::atomic<int64_t> blocking_host_to_device{0}, recorded_streams{0};
} counters;

// ---------------------------------------------------------------- memory

struct Blocks {
  std::mutex mutex;
  std::unordered_map<const void*, Block> device;
  std::unordered_map<const void*, std::pair<int, size_t>> pinned;
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

// An allocator hands a block out again at once to the stream that it belongs to. That is wrong while
// another stream may still use it, unless the allocator was told so (record_stream).
void forget_in_streams(const void* pointer, const Block& block) {
  std::lock_guard<std::recursive_mutex> lock(streams.mutex);
  Clock before = streams.clocks[block.owner];
  merge(before, streams.host);
  for (const auto& [stream, position] : block.uses) {
    const bool is_safe = stream == block.owner || block.recorded.count(stream) ||
                         at_of(before, stream) >= position;
    if (!is_safe) {
      ++streams.unsafe_frees;
      break;
    }
  }
  // What was queued to be read from it is read; what was to be written to it, nobody sees.
  Clock reads;
  for (const auto& copy : streams.pending) {
    if (copy.block == pointer && !copy.to_device) merge(reads, copy.clock);
  }
  complete(reads);
  auto is_write = [&](const Copy& copy) { return copy.block == pointer; };
  std::erase_if(streams.pending, is_write);
}

void free_device(void* pointer) {
  Block block;
  {
    std::lock_guard<std::mutex> lock(blocks.mutex);
    auto found = blocks.device.find(pointer);
    block = std::move(found->second);
    blocks.bytes[block.index] -= block.size;
    blocks.device.erase(found);
  }
  if (streams.delays) forget_in_streams(pointer, block);
  std::free(pointer);
}

// Note that the current stream uses a tensor's memory.
void note_use(const at::Tensor& tensor) {
  if (!streams.delays || !tensor.defined() || !tensor.is_privateuseone()) return;
  const Stream stream = current_of(tensor.device().index());
  std::lock_guard<std::recursive_mutex> order(streams.mutex);
  const int64_t position = at_of(streams.clocks[stream], stream);
  std::lock_guard<std::mutex> lock(blocks.mutex);
  auto found = blocks.device.find(tensor.storage().data());
  if (found != blocks.device.end()) found->second.uses[stream] = position;
}

void note_recorded(const void* pointer, c10::Stream stream) {
  ++counters.recorded_streams;
  std::lock_guard<std::mutex> lock(blocks.mutex);
  auto found = blocks.device.find(pointer);
  if (found != blocks.device.end()) found->second.recorded.insert(key_of(stream));
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
    blocks.device[pointer] = {current, size, current_of(current)};
    if (streams.delays) std::memset(pointer, 0xff, size);  // not a number until it is written
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
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    note_recorded(memory.get(), stream);
  }
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
    return {kType, static_cast<c10::DeviceIndex>(blocks.device.at(pointer).index)};
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
  static c10::Stream stream_of(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, device, id);
  }
  static c10::Device with_index(c10::Device device) {
    return device.has_index() ? device : c10::Device(kType, current);
  }
  c10::Stream getStream(c10::Device device) const override {
    device = with_index(device);
    return stream_of(device, current_stream.at(device.index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(with_index(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_of(with_index(device), ++streams.made);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto& now = current_stream.at(stream.device_index());
    return stream_of(stream.device(), std::exchange(now, stream.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kCount; }
  static bool is_done(const Clock& clock) {
    for (const auto& copy : streams.pending) {
      if (at_of(clock, copy.stream) >= at_of(copy.clock, copy.stream)) return false;
    }
    return true;
  }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard<std::recursive_mutex> lock(streams.mutex);
    return is_done(streams.clocks[key_of(stream)]);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    waited();
    host_waits_for(key_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    waited();
    std::lock_guard<std::recursive_mutex> lock(streams.mutex);
    Clock all;
    for (const auto& [stream, clock] : streams.clocks) {
      if (stream.first == index) merge(all, clock);
    }
    host_waits(all);
  }
  // An event is the clock that its stream had.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> lock(streams.mutex);
    if (*event == nullptr) *event = new Clock;
    *static_cast<Clock*>(*event) = streams.clocks[key_of(stream)];
  }
  void block(void* event, const c10::Stream& stream) const override {
    std::lock_guard<std::recursive_mutex> lock(streams.mutex);
    merge(streams.clocks[key_of(stream)], *static_cast<Clock*>(event));
  }
  bool queryEvent(void* event) const override {
    check_alive();
    std::lock_guard<std::recursive_mutex> lock(streams.mutex);
    return is_done(*static_cast<Clock*>(event));
  }
  void synchronizeEvent(void* event) const override {
    waited();
    std::lock_guard<std::recursive_mutex> lock(streams.mutex);
    host_waits(*static_cast<Clock*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Clock*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    note_recorded(memory.get(), stream);
  }
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

// Queue a copy between pinned memory and a device, if both are plain.
bool delay(const at::Tensor& source, const at::Tensor& target) {
  const bool is_plain = source.is_contiguous() && target.is_contiguous() &&
                        source.sizes() == target.sizes() && source.dtype() == target.dtype();
  if (!streams.delays || !is_plain) return false;
  const bool to_device = source.is_cpu();
  const auto& on_device = to_device ? target : source;
  const Stream stream = current_of(on_device.device().index());
  std::lock_guard<std::recursive_mutex> lock(streams.mutex);
  auto& clock = streams.clocks[stream];
  ++clock[stream];
  note_use(on_device);
  const Stream computing{stream.first, 0};
  if (to_device && at_of(clock, computing) < at_of(streams.clocks[computing], computing)) {
    ++streams.overlapping;
  }
  streams.pending.push_back({stream, clock, on_device.storage().data(), to_device,
                             to_device ? source : on_host(source),
                             to_device ? on_host(target) : target});
  const int64_t pending = streams.pending.size();
  streams.most_pending = std::max(streams.most_pending, pending);
  return true;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  check_alive();
  const auto& on_device = source.is_cpu() ? target : source;
  if (!in_kernel && source.is_cpu() != target.is_cpu()) {
    const bool waits = !non_blocking || !(source.is_cpu() ? source : target).is_pinned();
    ++(source.is_cpu() ? counters.host_to_device : counters.device_to_host);
    if (source.is_cpu()) counters.blocking_host_to_device += waits;
    else counters.synchronizations += waits;
    if (!waits && delay(source, target)) return target;
    begin_kernel(on_device.device().index());
    host_waits_for(current_of(on_device.device().index()));
  } else if (!in_kernel) {
    begin_kernel(on_device.device().index());
  }
  if (!in_kernel) {
    note_use(source);
    note_use(target);
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
  if (!in_kernel) {
    begin_kernel(tensor.device().index());
    host_waits_for(current_of(tensor.device().index()));
  }
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
  begin_kernel(input.device().index());
  note_use(input);
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
  if (!in_kernel) {
    begin_kernel(index);
    for (auto& value : torch::jit::last(*stack, count)) {
      if (value.isTensor()) note_use(value.toTensor());
      if (!value.isTensorList()) continue;
      for (const at::Tensor& tensor : value.toTensorVector()) note_use(tensor);
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

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  note_recorded(tensor.storage().data(), stream);
}

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

#if TORCH_VERSION_MINOR < 11
// Later ones bring it along; without it FSDP2's operators, which have no derivative, find no kernel.
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
#endif

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
at::Tensor host_alias(const at::Tensor& tensor) {
  begin_kernel(tensor.device().index());
  note_use(tensor);
  return on_host(tensor);
}

std::vector<int64_t> transfers() {
  std::lock_guard<std::recursive_mutex> lock(streams.mutex);
  const int64_t pending = streams.pending.size();
  return {pending, streams.most_pending, streams.overlapping, streams.unsafe_frees};
}

TORCH_LIBRARY(simulated, m) {
  m.def("rng_state(int index) -> Tensor", &rng_state);
  m.def("set_rng_state(Tensor state, int index) -> ()", &set_rng_state);
  m.def("manual_seed(int seed, int index) -> ()", &manual_seed);
  m.def("counts() -> int[]", &counts);
  m.def("limit_memory(int bytes, int index) -> ()", &limit_memory);
  m.def("memory_limit(int index) -> int", &memory_limit);
  m.def("delay_copies() -> ()", [] { streams.delays = true; });
  m.def("transfers() -> int[]", &transfers);
  m.def("lose() -> ()", [] { lost = true; });
  m.def("is_initialized() -> bool", [] { return blocks.initialized.load(); });
  m.def("host_alias(Tensor tensor) -> Tensor", &host_alias);
}

}  // namespace
