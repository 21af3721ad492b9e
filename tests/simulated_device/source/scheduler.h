// Streams as queues of closures, and one thread that runs them when the policy says so.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace sim {

// A point in a stream: done once all that was enqueued before it has run.
struct Mark {
  int64_t stream;
  bool done = false;
  std::chrono::steady_clock::time_point at{};
};
using MarkPtr = std::shared_ptr<Mark>;

// One entry of a stream.  It waits for a mark, sets one, or runs; what has a `poll` has run once
// that returns true.  A collective runs although nothing waits, if the host stands still: the host
// may be waiting for a rank that waits for this one.
struct Task {
  std::string name;
  std::function<void()> run;
  std::function<bool()> poll;
  MarkPtr waits;
  MarkPtr sets;
};

enum class Policy { early, late, random };

class Scheduler {
 public:
  static Scheduler& get();

  void choose(Policy policy, uint64_t seed);
  int64_t new_stream(int device);
  int device_of(int64_t stream);

  // `quiet`: leave it to a later call to run anything; for what is enqueued while memory is freed.
  void enqueue(int64_t stream, Task task, bool quiet = false);
  MarkPtr record(int64_t stream, bool quiet = false);
  void block(int64_t stream, const MarkPtr& mark);
  bool is_done(const MarkPtr& mark);
  bool is_idle(int64_t stream);
  void wait(const MarkPtr& mark);  // the host
  void wait_quietly(const MarkPtr& mark);  // without what has failed
  void wait_device(int device);
  void throw_failure();
  void fail(const std::string& what);  // the host hears of it when it next waits
  void stop();

  int64_t waits() const { return num_waits_; }
  int64_t tasks() const { return num_tasks_; }

 private:
  struct Queue {
    int device;
    std::deque<std::pair<uint64_t, Task>> tasks;
    bool started = false;  // the head's `run` has run, and its `poll` has not returned true
  };
  using Lock = std::unique_lock<std::mutex>;

  void start(Lock&);
  void loop();
  bool step(Lock&, Queue&);  // returns whether anything happened
  bool runnable(const Queue&) const;
  Queue* chosen(bool polls);
  Queue* towards(const MarkPtr&);
  template <typename Done>
  void block_host(Lock&, Done done);

  std::mutex mutex_;
  std::condition_variable to_executor_, to_host_;
  std::map<int64_t, Queue> queues_;
  std::vector<MarkPtr> wanted_;
  std::thread thread_;
  std::mt19937_64 random_;
  Policy policy_ = Policy::early;
  uint64_t sequence_ = 0;
  int64_t next_stream_ = 1, num_waits_ = 0, num_tasks_ = 0;
  int budget_ = 0;  // tasks that `random` still runs now
  int in_flight_ = 0;
  bool stops_ = false, is_settled_ = false;
  std::string failure_;
  std::chrono::steady_clock::time_point last_call_{};
};

}  // namespace sim
