#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "device.h"

namespace sim {

namespace {

constexpr size_t ARENA = size_t(1) << 36;  // of addresses; pages come when they are written
constexpr size_t GRAIN = 512;
constexpr int POISON = 0xFF;  // NaN in every float, -1 in every integer

struct Block {
  char* base;
  size_t bytes;
  int device;
  int64_t stream;
  std::vector<MarkPtr> users;
  std::vector<int64_t> streams;
};

struct Arena {
  char* hidden;  // the tensors' addresses
  char* shown;
  size_t used = 0;

  Arena() {
    const int file = memfd_create("simulated device", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, ARENA) == 0, "no memory for a simulated device");
    auto map = [&](int protection) {
      void* at = mmap(nullptr, ARENA, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
      TORCH_CHECK(at != MAP_FAILED, "no addresses for a simulated device");
      return static_cast<char*>(at);
    };
    hidden = map(PROT_NONE);
    shown = map(PROT_READ | PROT_WRITE);
    close(file);
  }
};

Arena& arena() {
  static auto* one = new Arena();
  return *one;
}

// A caching allocator: what is freed is the next block of its size on its stream at once, as what
// comes later in that stream runs later.  Other streams say `used_on`, or read poison.
struct DeviceAllocator final : c10::Allocator {
  std::mutex mutex;
  std::unordered_map<char*, Block*> alive;
  std::map<std::tuple<int, int64_t, size_t>, std::vector<Block*>> free;
  std::vector<Block*> pending;
  std::map<char*, Block*> by_base;  // alive or not
  int64_t allocated[DEVICES] = {}, peak[DEVICES] = {};

  c10::DataPtr allocate(size_t n) override {
    const int device = current_device();
    const c10::Device where(TYPE, device);
    if (n == 0) return {nullptr, nullptr, &release, where};
    Scheduler::get().throw_failure();
    const size_t bytes = (n + GRAIN - 1) / GRAIN * GRAIN;
    const int64_t stream = current_stream(device);
    std::lock_guard<std::mutex> guard(mutex);
    reclaim();
    auto& list = free[{device, stream, bytes}];
    Block* block;
    if (!list.empty()) {
      block = list.back();
      list.pop_back();
    } else {
      auto& whole = arena();
      TORCH_CHECK(whole.used + bytes + GRAIN <= ARENA, "the simulated device is out of memory");
      block = new Block{whole.hidden + whole.used, bytes, device, stream, {}, {}};
      whole.used += bytes + GRAIN;  // neighbours are no neighbours in memory
      by_base[block->base] = block;
      poison(block);
    }
    alive[block->base] = block;
    allocated[device] += bytes;
    peak[device] = std::max(peak[device], allocated[device]);
    return {block->base, block->base, &release, where};
  }

  static void release(void* context);

  void poison(Block* block) {
    Task task;
    task.name = "poison";
    task.run = [block] { memset(shadow(block->base), POISON, block->bytes); };
    Scheduler::get().enqueue(block->stream, std::move(task), true);
  }

  void give_back(char* base) {
    std::lock_guard<std::mutex> guard(mutex);
    Block* block = alive.at(base);
    alive.erase(base);
    allocated[block->device] -= block->bytes;
    for (auto stream : block->streams)
      block->users.push_back(Scheduler::get().record(stream, true));
    block->streams.clear();
    pending.push_back(block);
    reclaim();
  }

  void reclaim() {
    auto& scheduler = Scheduler::get();
    std::vector<Block*> left;
    for (auto* block : pending) {
      bool used = false;
      for (auto& mark : block->users) used |= !scheduler.is_done(mark);
      if (used) {
        left.push_back(block);
        continue;
      }
      block->users.clear();
      poison(block);
      free[{block->device, block->stream, block->bytes}].push_back(block);
    }
    pending.swap(left);
  }

  void copy_data(void* into, const void* from, size_t count) const override {
    TORCH_CHECK(false, "the simulated device copies tensors, not storages");
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
};

DeviceAllocator& devices() {
  static auto* one = new DeviceAllocator();
  return *one;
}

void DeviceAllocator::release(void* context) {
  if (context) devices().give_back(static_cast<char*>(context));
}

// Pinned memory: the host's, and kept until the copies that streams make of it are done.
struct PinnedAllocator final : c10::Allocator {
  std::mutex mutex;
  std::map<char*, Block*> alive;
  std::map<size_t, std::vector<Block*>> free;
  std::vector<Block*> pending;

  c10::DataPtr allocate(size_t n) override {
    std::lock_guard<std::mutex> guard(mutex);
    reclaim();
    const size_t bytes = std::max<size_t>((n + 63) / 64 * 64, 64);
    auto& list = free[bytes];
    Block* block;
    if (!list.empty()) {
      block = list.back();
      list.pop_back();
    } else {
      void* base = nullptr;
      TORCH_CHECK(posix_memalign(&base, 4096, bytes) == 0, "no pinned memory");
      block = new Block{static_cast<char*>(base), bytes, -1, 0, {}, {}};
    }
    memset(block->base, POISON, block->bytes);
    alive[block->base] = block;
    return {block->base, block->base, &release, c10::Device(c10::DeviceType::CPU)};
  }

  static void release(void* context);

  void reclaim() {
    std::vector<Block*> left;
    for (auto* block : pending) {
      bool used = false;
      for (auto& mark : block->users) used |= !Scheduler::get().is_done(mark);
      if (used) {
        left.push_back(block);
        continue;
      }
      block->users.clear();
      memset(block->base, POISON, block->bytes);
      free[block->bytes].push_back(block);
    }
    pending.swap(left);
  }

  Block* holding(const void* address) {
    auto* at = static_cast<char*>(const_cast<void*>(address));
    auto found = alive.upper_bound(at);
    if (found == alive.begin()) return nullptr;
    Block* block = std::prev(found)->second;
    return at < block->base + block->bytes ? block : nullptr;
  }

  void copy_data(void* into, const void* from, size_t count) const override {
    default_copy_data(into, from, count);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
};

PinnedAllocator& pinned() {
  static auto* one = new PinnedAllocator();
  return *one;
}

void PinnedAllocator::release(void* context) {
  auto& all = pinned();
  std::lock_guard<std::mutex> guard(all.mutex);
  auto found = all.alive.find(static_cast<char*>(context));
  all.pending.push_back(found->second);
  all.alive.erase(found);
  all.reclaim();
}

void add_stream(Block* block, int64_t stream) {
  if (block->stream == stream) return;
  for (auto one : block->streams)
    if (one == stream) return;
  block->streams.push_back(stream);
}

}  // namespace

bool is_device_memory(const void* address) {
  auto* at = static_cast<const char*>(address);
  return at >= arena().hidden && at < arena().hidden + ARENA;
}

void* shadow(const void* address) {
  if (!address) return nullptr;
  TORCH_INTERNAL_ASSERT(is_device_memory(address));
  return arena().shown + (static_cast<const char*>(address) - arena().hidden);
}

c10::Allocator* device_allocator() { return &devices(); }
c10::Allocator* pinned_allocator() { return &pinned(); }

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> guard(pinned().mutex);
  return pinned().holding(address) != nullptr;
}

void used_on(const void* address, int64_t stream) {
  if (!address) return;
  auto& all = devices();
  std::lock_guard<std::mutex> guard(all.mutex);
  auto found = all.by_base.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  if (found != all.by_base.begin()) add_stream(std::prev(found)->second, stream);
}

void used_until(const void* address, const MarkPtr& mark) {
  std::lock_guard<std::mutex> guard(pinned().mutex);
  Block* block = pinned().holding(address);
  if (!block) return;
  auto is_done = [](const MarkPtr& one) { return Scheduler::get().is_done(one); };
  block->users.erase(std::remove_if(block->users.begin(), block->users.end(), is_done),
                     block->users.end());
  block->users.push_back(mark);
}

void register_host(int64_t address, int64_t bytes) {
  std::lock_guard<std::mutex> guard(pinned().mutex);
  auto* base = reinterpret_cast<char*>(address);
  pinned().alive[base] = new Block{base, static_cast<size_t>(bytes), -1, 0, {}, {}};
}

void unregister_host(int64_t address) {
  std::vector<MarkPtr> users;
  {
    std::lock_guard<std::mutex> guard(pinned().mutex);
    auto found = pinned().alive.find(reinterpret_cast<char*>(address));
    users.swap(found->second->users);
    delete found->second;
    pinned().alive.erase(found);
  }
  for (auto& mark : users) {
    if (Scheduler::get().is_done(mark)) continue;
    Scheduler::get().fail("host memory is unpinned while a stream still copies it");
    Scheduler::get().wait_quietly(mark);
  }
}

int64_t allocated_bytes(int device) { return devices().allocated[device]; }
int64_t peak_bytes(int device) { return devices().peak[device]; }
void reset_peak(int device) { devices().peak[device] = devices().allocated[device]; }

}  // namespace sim
