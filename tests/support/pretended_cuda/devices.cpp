// CUDA devices whose memory is the host's, for a torch that was built without CUDA: memory, streams, events and hooks.
//
// A stream is a queue of copies. Kernels and copies within a device run at once, after the copies queued on their stream. With
// late copies, a copy between a device and pinned memory stays in the queue until something waits for it: that is as late
// as CUDA may run it, so a wait that is missing in the program changes its numbers.
#include "devices.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

namespace pretended {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;

constexpr DeviceIndex kMaxDevices = 16;
constexpr int kUnwritten = 0xff;  // NaN in every floating type: memory that is read before it is written shows

std::atomic<int> num_devices{0};
std::atomic<int64_t> copy_delay{0};  // microseconds from a wait to the copies that it waits for; 0: copies are not late
std::atomic<void (*)(const char*)> notify{nullptr};
std::array<std::atomic<int64_t>, kMaxDevices> allocated{}, peak{};
std::array<std::atomic<bool>, kMaxDevices> has_context{};
thread_local DeviceIndex device_of_thread = 0;
thread_local std::array<StreamId, kMaxDevices> stream_of_thread{};

std::mutex collectives_mutex;
std::map<std::string, int64_t> collectives;

void make_context(DeviceIndex index) {
  if (!has_context[index].exchange(true)) note("context " + std::to_string(index));
}

// ------------------------------------------------------------------------------------------------------------ memory

void add_memory(DeviceIndex index, int64_t bytes) {
  const int64_t now = allocated[index] += bytes;
  int64_t most = peak[index];
  while (now > most && !peak[index].compare_exchange_weak(most, now)) {
  }
}

struct Block {
  void* data;
  int64_t bytes;
  DeviceIndex device;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  add_memory(block->device, -block->bytes);
  c10::free_cpu(block->data);
  delete block;
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const DeviceIndex index = device_of_thread;
    make_context(index);
    void* data = bytes ? c10::alloc_cpu(bytes) : nullptr;
    if (data) std::memset(data, kUnwritten, bytes);
    add_memory(index, static_cast<int64_t>(bytes));
    return {data, new Block{data, static_cast<int64_t>(bytes), index}, &free_block, Device(at::kCUDA, index)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned_blocks;  // first byte -> size

void free_pinned(void* data) {
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_blocks.erase(static_cast<const char*>(data));
  }
  c10::free_cpu(data);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? c10::alloc_cpu(bytes) : nullptr;
    if (data) {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned_blocks[static_cast<const char*>(data)] = bytes;
    }
    return {data, data, &free_pinned, Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

DeviceAllocator the_device_allocator;
PinnedAllocator the_pinned_allocator;

// A storage that a tensor on the other side shares; with a device, its bytes count as memory of the device.
struct SharedStorage {
  c10::Storage storage;
  int device = -1;
  int64_t bytes = 0;
  ~SharedStorage() {
    if (device >= 0) add_memory(static_cast<DeviceIndex>(device), -bytes);
  }
};

void release_shared(void* context) { delete static_cast<SharedStorage*>(context); }

at::Tensor share(const at::Tensor& tensor, SharedStorage* shared, Device device, c10::Allocator* allocator) {
  c10::DataPtr data(shared->storage.mutable_data(), shared, &release_shared, device);
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), shared->storage.nbytes(), std::move(data), allocator, /*resizable=*/true);
  const auto key = device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  result._set_neg(tensor.is_neg());
  result._set_conj(tensor.is_conj());
  return result;
}

// ----------------------------------------------------------------------------------------------------------- streams

struct Copy {
  at::Tensor to, from;  // host views, which keep the memory
  size_t bytes;
};

struct Queue {
  std::deque<Copy> copies;
  uint64_t num_done = 0;
  uint64_t end() const { return num_done + copies.size(); }
};

struct RecordedEvent {
  DeviceIndex device;
  StreamId stream;
  uint64_t end;  // of the queue when the event was recorded
};

std::mutex queues_mutex;  // held during a copy: who waits for it must not go on before
std::map<std::pair<DeviceIndex, StreamId>, Queue> queues;
std::atomic<StreamId> last_stream{0};

void run_copies(DeviceIndex device, StreamId stream, uint64_t end) {
  std::lock_guard<std::mutex> lock(queues_mutex);
  const auto found = queues.find({device, stream});
  if (found == queues.end()) return;
  auto& queue = found->second;
  while (queue.num_done < end && !queue.copies.empty()) {
    const Copy& copy = queue.copies.front();
    std::memcpy(copy.to.mutable_data_ptr(), copy.from.const_data_ptr(), copy.bytes);
    queue.copies.pop_front();
    ++queue.num_done;
  }
}

uint64_t queue_end(DeviceIndex device, StreamId stream) {
  std::lock_guard<std::mutex> lock(queues_mutex);
  const auto found = queues.find({device, stream});
  return found == queues.end() ? 0 : found->second.end();
}

void synchronize_device(DeviceIndex device) {
  std::vector<StreamId> streams;
  {
    std::lock_guard<std::mutex> lock(queues_mutex);
    for (const auto& [key, queue] : queues)
      if (key.first == device) streams.push_back(key.second);
  }
  for (const auto stream : streams) run_copies(device, stream, UINT64_MAX);
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return at::kCUDA; }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(num_devices); }
  Device getDevice() const override { return Device(at::kCUDA, device_of_thread); }
  void setDevice(Device device) const override {
    if (device.has_index()) set_device(device.index());
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) restore_device(device.index());
  }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }

  Stream getStream(Device device) const override {
    const auto index = device.has_index() ? device.index() : device_of_thread;
    return Stream(Stream::UNSAFE, Device(at::kCUDA, index), stream_of_thread[index]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, Device(at::kCUDA, device.has_index() ? device.index() : device_of_thread));
  }
  Stream getNewStream(Device device, int = 0) const override {
    return Stream(Stream::UNSAFE, getDefaultStream(device).device(), ++last_stream);
  }
  Stream getStreamFromGlobalPool(Device device, bool = false) const override { return getNewStream(device); }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    stream_of_thread[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override {
    std::lock_guard<std::mutex> lock(queues_mutex);
    const auto found = queues.find({stream.device_index(), stream.id()});
    return found == queues.end() || found->second.copies.empty();
  }
  void synchronizeStream(const Stream& stream) const override {
    note("wait stream.synchronize");
    run_copies(stream.device_index(), stream.id(), UINT64_MAX);
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    note("wait cuda.synchronize");
    pretended::synchronize_device(device);
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    auto* recorded = static_cast<RecordedEvent*>(*event);
    if (!recorded) *event = recorded = new RecordedEvent;
    *recorded = {stream.device_index(), stream.id(), queue_end(stream.device_index(), stream.id())};
  }
  void block(void* event, const Stream&) const override { arrive(event); }
  bool queryEvent(void* event) const override {
    const auto* recorded = static_cast<RecordedEvent*>(event);
    if (!recorded) return true;
    std::lock_guard<std::mutex> lock(queues_mutex);
    const auto found = queues.find({recorded->device, recorded->stream});
    return found == queues.end() || found->second.num_done >= recorded->end;
  }
  void synchronizeEvent(void* event) const override {
    note("wait event.synchronize");
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(copy_delay);
    while (!queryEvent(event) && std::chrono::steady_clock::now() < end)  // another stream may wait for it meanwhile
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    arrive(event);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<RecordedEvent*>(event);
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0; }

 private:
  static void arrive(void* event) {
    if (const auto* recorded = static_cast<RecordedEvent*>(event))
      run_copies(recorded->device, recorded->stream, recorded->end);
  }
};

// ------------------------------------------------------------------------------------------------------------- hooks

class Hooks final : public at::CUDAHooksInterface {
 public:
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return num_devices > 0; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices > 0; }
  bool hasPrimaryContext(DeviceIndex index) const override { return has_context[index]; }
  int getNumGPUs() const override { return num_devices; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(num_devices); }
  DeviceIndex getCurrentDevice() const override { return device_of_thread; }
  DeviceIndex current_device() const override { return device_of_thread; }
  void setCurrentDevice(DeviceIndex index) const override { set_device(index); }
  void deviceSynchronize(DeviceIndex index) const override { synchronize_device(index); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &the_pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &the_device_allocator; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  Device getDeviceFromPtr(void*) const override { return Device(at::kCUDA, device_of_thread); }
  // the CPU's generator, which the CPU's kernels use: random numbers are those of a run on CPU
  const at::Generator& getDefaultGenerator(DeviceIndex = -1) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(DeviceIndex = -1) const override { return at::detail::createCPUGenerator(); }
  std::string showConfig() const override { return "pretended CUDA devices"; }
};

// DDP's reducer asks for a timer of the device.
class HostTimer final : public c10d::Timer {
 public:
  explicit HostTimer(Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto first = getTimeRef(start), last = getTimeRef(end);
    if (first == c10d::kUnsetTime || last == c10d::kUnsetTime) return std::nullopt;
    return last - first;
  }
};

Guard the_guard;

}  // namespace

// ----------------------------------------------------------------------------------------------------------- devices.h

void note(const std::string& event) {
  if (auto* function = notify.load()) function(event.c_str());
}

void count_collective(const std::string& name) {
  std::lock_guard<std::mutex> lock(collectives_mutex);
  ++collectives[name];
}

DeviceIndex current_device() { return device_of_thread; }

void set_device(DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < num_devices, "CUDA error: invalid device ordinal");
  device_of_thread = index;
  make_context(index);
}

void restore_device(DeviceIndex index) { device_of_thread = index; }

c10::Allocator* device_allocator() { return &the_device_allocator; }

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  const auto* byte = static_cast<const char*>(data);
  auto next = pinned_blocks.upper_bound(byte);
  if (next == pinned_blocks.begin()) return false;
  --next;
  return byte < next->first + next->second;
}

at::Tensor host_view(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  return share(tensor, new SharedStorage{tensor.storage()}, Device(at::kCPU), c10::GetCPUAllocator());
}

at::Tensor on_device(const at::Tensor& host, Device device) {
  if (!host.defined() || host.is_cuda()) return host;
  const auto bytes = static_cast<int64_t>(host.storage().nbytes());
  add_memory(device.index(), bytes);
  return share(host, new SharedStorage{host.storage(), device.index(), bytes}, device, &the_device_allocator);
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  const auto before = device_of_thread;
  device_of_thread = impl->device().index();
  auto data = the_device_allocator.allocate(bytes);
  device_of_thread = before;
  if (const auto kept = std::min(bytes, impl->nbytes())) std::memcpy(data.get(), storage.data(), kept);
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(bytes);
}

void run_pending_copies(DeviceIndex device) {
  if (copy_delay) run_copies(device, stream_of_thread[device], UINT64_MAX);
}

void copy_later(const at::Tensor& to, const at::Tensor& from, size_t bytes, DeviceIndex device) {
  std::lock_guard<std::mutex> lock(queues_mutex);
  queues[{device, stream_of_thread[device]}].copies.push_back({to, from, bytes});
}

bool copies_are_late() { return copy_delay > 0; }

}  // namespace pretended

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, pretended::Hooks)
}
namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, pretended::HostTimer)
}

// ------------------------------------------------------------------------------------------------- functions for Python

extern "C" {
void pretended_start(int count, void (*function)(const char*)) {
  pretended::notify = function;
  pretended::num_devices = count;
  c10::SetAllocator(c10::DeviceType::CUDA, &pretended::the_device_allocator);
  c10::impl::registerDeviceGuard(c10::DeviceType::CUDA, &pretended::the_guard);
}
void pretended_stop_notes() { pretended::notify = nullptr; }
void pretended_set_device_count(int count) { pretended::num_devices = count; }
void pretended_set_copy_delay(int64_t microseconds) { pretended::copy_delay = microseconds; }
int pretended_get_device() { return pretended::device_of_thread; }
void pretended_set_device(int index) { pretended::set_device(static_cast<c10::DeviceIndex>(index)); }
void pretended_restore_device(int index) { pretended::restore_device(static_cast<c10::DeviceIndex>(index)); }
bool pretended_has_context(int index) { return pretended::has_context[index]; }
int64_t pretended_get_stream(int device) { return pretended::stream_of_thread[device]; }
void pretended_set_stream(int device, int64_t stream) { pretended::stream_of_thread[device] = stream; }
void pretended_synchronize() {
  pretended::the_guard.synchronizeDevice(pretended::device_of_thread);
}
int64_t pretended_allocated(int device) { return pretended::allocated[device]; }
int64_t pretended_peak(int device) { return pretended::peak[device]; }
void pretended_reset_peak(int device) { pretended::peak[device] = pretended::allocated[device].load(); }
// one line "NAME COUNT" for each collective
const char* pretended_collectives() {
  static std::string text;
  std::lock_guard<std::mutex> lock(pretended::collectives_mutex);
  text.clear();
  for (const auto& [name, count] : pretended::collectives) text += name + " " + std::to_string(count) + "\n";
  return text.c_str();
}
}
