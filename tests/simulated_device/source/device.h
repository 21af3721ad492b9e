// Memory of the simulated devices, and the current device and stream of a thread.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include "scheduler.h"

namespace sim {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 4;

// Where the executor reads and writes what the host may not touch at `address`.
void* shadow(const void* address);
bool is_device_memory(const void* address);

int current_device();
void set_current_device(int device);
int64_t current_stream(int device);
int64_t exchange_stream(int device, int64_t stream);
int64_t default_stream(int device);
c10::Stream as_stream(int64_t stream);

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
// What `record_stream` promises: the block is not given to others before the stream is here.
void used_on(const void* address, int64_t stream);
// The same of pinned memory, which a copy uses until then.
void used_until(const void* address, const MarkPtr& mark);
// Pin memory that is not ours, as cudaHostRegister does.
void register_host(int64_t address, int64_t bytes);
void unregister_host(int64_t address);
int64_t allocated_bytes(int device);
int64_t peak_bytes(int device);
void reset_peak(int device);

// The CPU generator that draws for this one (the default one of a device if undefined).
at::Generator drawing(const std::optional<at::Generator>& generator, int device);

}  // namespace sim
