// Streams of the simulated device, and copies that are delayed.
//
// A kernel has run when its call returns, whatever its stream. With `delay_copies` a copy that does
// not block (to or from pinned memory) is done only when it is waited for: by the host, or by the
// next kernel of a stream that has waited for it, or on which it was queued. Each stream, event and
// the host have a clock, which says of each stream how much of its work is known to be done.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace {

constexpr int kCount = 4;

using Stream = std::pair<int, c10::StreamId>;  // of a device
using Clock = std::map<Stream, int64_t>;

int64_t at_of(const Clock& clock, Stream stream) {
  auto found = clock.find(stream);
  return found == clock.end() ? 0 : found->second;
}

void merge(Clock& clock, const Clock& other) {
  for (const auto& [stream, position] : other) {
    clock[stream] = std::max(at_of(clock, stream), position);
  }
}

struct Block {
  int index;
  size_t size;
  Stream owner;           // the stream that was current when it was allocated
  Clock uses;             // the last of each stream
  std::set<Stream> recorded;
};

struct Copy {
  Stream stream;
  Clock clock;            // of its stream, with itself
  const void* block;      // on the device
  bool to_device;
  at::Tensor source, target;  // both in host memory; of the device's an alias, which owns nothing
};

struct Streams {
  std::recursive_mutex mutex;
  std::atomic<bool> delays{false};
  std::atomic<c10::StreamId> made{0};
  std::map<Stream, Clock> clocks;
  Clock host;
  std::deque<Copy> pending;
  int64_t most_pending = 0, overlapping = 0, unsafe_frees = 0;
};
// Never destroyed: tensors are freed until the process ends.
Streams& streams = *new Streams;

thread_local std::array<c10::StreamId, kCount> current_stream{};

Stream current_of(c10::DeviceIndex index) { return {index, current_stream.at(index)}; }
Stream key_of(c10::Stream stream) { return {stream.device_index(), stream.id()}; }

// Do the delayed copies that a clock knows to be done, and those before them; in order.
void complete(Clock clock) {
  std::vector<bool> due(streams.pending.size());
  for (size_t i = due.size(); i-- > 0;) {
    const auto& copy = streams.pending[i];
    due[i] = at_of(clock, copy.stream) >= at_of(copy.clock, copy.stream);
    if (due[i]) merge(clock, copy.clock);
  }
  std::deque<Copy> left;
  for (size_t i = 0; i < due.size(); ++i) {
    if (due[i]) std::memcpy(streams.pending[i].target.data_ptr(),
                            streams.pending[i].source.data_ptr(),
                            streams.pending[i].source.nbytes());
    else left.push_back(std::move(streams.pending[i]));
  }
  streams.pending = std::move(left);
}

// A kernel on the current stream of a device: what is queued before it is done.
void begin_kernel(c10::DeviceIndex index) {
  if (!streams.delays) return;
  std::lock_guard<std::recursive_mutex> lock(streams.mutex);
  const Stream stream = current_of(index);
  auto& clock = streams.clocks[stream];
  ++clock[stream];
  complete(clock);
}

// The host waits for what a clock says.
void host_waits(const Clock& clock) {
  complete(clock);
  merge(streams.host, clock);
}

void host_waits_for(Stream stream) {
  if (!streams.delays) return;
  std::lock_guard<std::recursive_mutex> lock(streams.mutex);
  host_waits(streams.clocks[stream]);
}

}  // namespace
