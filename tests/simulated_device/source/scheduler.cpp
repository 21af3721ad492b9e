#include "scheduler.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <Python.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace sim {

namespace {
// Kernels' warnings are of the CPU's ways, such as outputs that are resized to and fro.
struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

constexpr auto STILL = std::chrono::milliseconds(100);  // before collectives run by themselves
constexpr auto POLL = std::chrono::milliseconds(1);
}  // namespace

Scheduler& Scheduler::get() {
  static auto* scheduler = new Scheduler();  // outlives all that is freed at exit
  return *scheduler;
}

void Scheduler::choose(Policy policy, uint64_t seed) {
  Lock lock(mutex_);
  policy_ = policy;
  random_.seed(seed);
}

int64_t Scheduler::new_stream(int device) {
  Lock lock(mutex_);
  const int64_t stream = next_stream_++;
  queues_[stream].device = device;
  return stream;
}

int Scheduler::device_of(int64_t stream) {
  Lock lock(mutex_);
  return queues_.at(stream).device;
}

// Let `done` come true while the executor runs; Python's other threads go on.
template <typename Done>
void Scheduler::block_host(Lock& lock, Done done) {
  if (done()) return;
  PyThreadState* state = nullptr;
  if (Py_IsInitialized() && PyGILState_Check()) {
    lock.unlock();
    state = PyEval_SaveThread();
    lock.lock();
  }
  to_executor_.notify_one();
  to_host_.wait(lock, done);
  if (state) {
    lock.unlock();
    PyEval_RestoreThread(state);
    lock.lock();
  }
}

void Scheduler::start(Lock&) {
  if (!thread_.joinable() && !stops_) thread_ = std::thread([this] { loop(); });
}

void Scheduler::enqueue(int64_t stream, Task task, bool quiet) {
  Lock lock(mutex_);
  if (stops_) return;
  start(lock);
  queues_.at(stream).tasks.emplace_back(sequence_++, std::move(task));
  is_settled_ = false;
  last_call_ = std::chrono::steady_clock::now();
  if (quiet) return;
  if (policy_ == Policy::random) {
    budget_ = random_() % 2 ? 0 : random_() % 6;
    block_host(lock, [&] { return budget_ == 0 || stops_; });
  } else if (policy_ == Policy::early) {
    block_host(lock, [&] { return is_settled_ || stops_; });
  }
}

MarkPtr Scheduler::record(int64_t stream, bool quiet) {
  auto mark = std::make_shared<Mark>();
  mark->stream = stream;
  {
    Lock lock(mutex_);
    if (queues_.at(stream).tasks.empty()) {
      mark->done = true;
      mark->at = std::chrono::steady_clock::now();
      return mark;
    }
  }
  Task task;
  task.name = "record";
  task.sets = mark;
  enqueue(stream, std::move(task), quiet);
  return mark;
}

void Scheduler::block(int64_t stream, const MarkPtr& mark) {
  if (!mark || mark->stream == stream || is_done(mark)) return;
  Task task;
  task.name = "wait";
  task.waits = mark;
  enqueue(stream, std::move(task));
}

bool Scheduler::is_done(const MarkPtr& mark) {
  Lock lock(mutex_);
  return mark->done;
}

bool Scheduler::is_idle(int64_t stream) {
  Lock lock(mutex_);
  return queues_.at(stream).tasks.empty();
}

void Scheduler::wait_quietly(const MarkPtr& mark) {
  Lock lock(mutex_);
  num_waits_++;
  last_call_ = std::chrono::steady_clock::now();
  if (mark->done || stops_) return;
  wanted_.push_back(mark);
  block_host(lock, [&] { return mark->done || stops_; });
  wanted_.erase(std::find(wanted_.begin(), wanted_.end(), mark));
}

void Scheduler::wait(const MarkPtr& mark) {
  if (mark) wait_quietly(mark);
  throw_failure();
}

void Scheduler::wait_device(int device) {
  std::vector<int64_t> streams;
  {
    Lock lock(mutex_);
    for (auto& [stream, queue] : queues_)
      if (queue.device == device && !queue.tasks.empty()) streams.push_back(stream);
  }
  for (auto stream : streams) wait(record(stream));
  throw_failure();
}

void Scheduler::throw_failure() {
  Lock lock(mutex_);
  std::string failure;
  failure.swap(failure_);
  TORCH_CHECK(failure.empty(), "on the simulated device: ", failure);
}

void Scheduler::fail(const std::string& what) {
  Lock lock(mutex_);
  if (failure_.empty()) failure_ = what;
}

void Scheduler::stop() {
  {
    Lock lock(mutex_);
    stops_ = true;
    to_executor_.notify_all();
    to_host_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

bool Scheduler::runnable(const Queue& queue) const {
  if (queue.tasks.empty()) return false;
  const Task& head = queue.tasks.front().second;
  return !head.waits || head.waits->done;
}

// The queue that `mark` needs a step of, by whatever that one waits for.
Scheduler::Queue* Scheduler::towards(const MarkPtr& mark) {
  const Mark* at = mark.get();
  for (size_t hop = 0; hop <= queues_.size(); hop++) {
    Queue& queue = queues_.at(at->stream);
    if (queue.tasks.empty()) return nullptr;
    const Task& head = queue.tasks.front().second;
    if (!head.waits || head.waits->done) return &queue;
    at = head.waits.get();
  }
  return nullptr;
}

// The next queue to take a step of; with `polls`, also one whose head is under way elsewhere.
Scheduler::Queue* Scheduler::chosen(bool polls) {
  std::vector<Queue*> found;
  auto add = [&](Queue* queue) {
    if (queue && runnable(*queue) && (polls || !queue->started)) found.push_back(queue);
  };
  if (policy_ == Policy::late || (policy_ == Policy::random && !budget_ && wanted_.empty())) {
    for (auto& mark : wanted_)
      if (!mark->done) add(towards(mark));
    return found.empty() ? nullptr : found.front();
  }
  for (auto& [_, queue] : queues_) add(&queue);
  if (found.empty()) return nullptr;
  if (policy_ == Policy::random) return found[random_() % found.size()];
  return *std::min_element(found.begin(), found.end(), [](Queue* a, Queue* b) {
    return a->tasks.front().first < b->tasks.front().first;
  });
}

bool Scheduler::step(Lock& lock, Queue& queue) {
  Task& task = queue.tasks.front().second;  // a deque's elements stay where they are
  std::string failure;
  bool done = true;
  const bool begins = !queue.started;
  if (task.run || task.poll) {
    lock.unlock();
    try {
      if (begins && task.run) task.run();
      if (task.poll) done = task.poll();
    } catch (const c10::Error& error) {
      failure = task.name + ": " + error.what_without_backtrace();
    } catch (const std::exception& error) {
      failure = task.name + ": " + error.what();
    }
    lock.lock();
  }
  if (!failure.empty()) {
    if (failure_.empty()) failure_ = failure;
    done = true;
  }
  if (begins && !done) in_flight_++;
  if (!begins && done) in_flight_--;
  queue.started = !done;
  if (!done) return begins;
  if (task.sets) {
    task.sets->done = true;
    task.sets->at = std::chrono::steady_clock::now();
  }
  Task finished = std::move(task);
  queue.tasks.pop_front();
  num_tasks_++;
  lock.unlock();
  finished = Task();  // what it held may have to be freed
  lock.lock();
  return true;
}


void Scheduler::loop() {
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard no_warnings(&silent);
  at::AutoDispatchBelowAutograd below;
  at::NoGradGuard no_grad;
  Lock lock(mutex_);
  while (!stops_) {
    bool has_run = false;
    if (Queue* queue = chosen(false)) {
      has_run = step(lock, *queue);
    } else if (in_flight_) {
      for (auto& [_, other] : queues_)
        if (other.started && runnable(other)) has_run |= step(lock, other);
    }
    if (policy_ == Policy::random && budget_ > 0) budget_ = has_run ? budget_ - 1 : 0;
    if (has_run) {
      to_host_.notify_all();
      continue;
    }
    budget_ = 0;
    is_settled_ = true;
    to_host_.notify_all();
    if (in_flight_) {
      to_executor_.wait_for(lock, POLL);
    } else {
      to_executor_.wait_for(lock, STILL);
    }
    if (policy_ == Policy::early) continue;
    if (std::chrono::steady_clock::now() - last_call_ < STILL) continue;
    // The host stands still: what another rank may wait for has to go on.
    for (auto& [stream, queue] : queues_) {
      auto is_collective = [](auto& entry) { return bool(entry.second.poll); };
      while (!stops_ && !queue.started &&
             std::any_of(queue.tasks.begin(), queue.tasks.end(), is_collective)) {
        auto mark = std::make_shared<Mark>();
        mark->stream = stream;
        Queue* next = towards(mark);
        if (!next || next->started || !step(lock, *next)) break;
      }
    }
    to_host_.notify_all();
  }
}

}  // namespace sim
