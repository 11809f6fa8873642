// What the parts of the pretended CUDA devices share: memory, streams, and notes for Python.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <string>

namespace pretended {

// Calls Python with what happened, such as "wait item"; Python finds out where.
void note(const std::string& event);
void count_collective(const std::string& name);

c10::DeviceIndex current_device();
// Make a device current, as cudaSetDevice does: the first time, it creates a context on that device.
void set_device(c10::DeviceIndex index);
// Make a device current without creating a context on it.
void restore_device(c10::DeviceIndex index);

c10::Allocator* device_allocator();
bool is_pinned(const void* data);

// A CPU tensor on the memory of a CUDA tensor; other tensors are returned as they are.
at::Tensor host_view(const at::Tensor& tensor);
// A CUDA tensor on the memory of a CPU tensor, counted as memory of the device.
at::Tensor on_device(const at::Tensor& host, c10::Device device);
void resize_storage(const c10::Storage& storage, size_t bytes);

// Run the copies that the current stream of a device still has to do: the next operation on this stream comes after them.
void run_pending_copies(c10::DeviceIndex device);
// Copy `bytes` on the current stream of a device; with late copies, when something waits for the stream.
void copy_later(const at::Tensor& to, const at::Tensor& from, size_t bytes, c10::DeviceIndex device);
bool copies_are_late();

}  // namespace pretended
