#include "group.h"

#include <ATen/ATen.h>

#include <functional>
#include <numeric>
#include <set>

#include "clocks.h"
#include "recorder.h"
#include "tensors.h"
#include "transport.h"

namespace simdev {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

at::Tensor flat_on_host(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_contiguous(), "tensors of a collective must be contiguous; got strides ", tensor.strides(), " of sizes ", tensor.sizes());
  return (on_device(tensor) ? on_host(tensor) : tensor.detach()).view(-1);
}

Tensors flat_on_host(const Tensors& tensors) {
  Tensors flat;
  for (const auto& tensor : tensors) flat.push_back(flat_on_host(tensor));
  return flat;
}

int64_t bytes_of(const Tensors& tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), int64_t{0}, [](int64_t sum, const at::Tensor& tensor) {
    return sum + static_cast<int64_t>(tensor.nbytes());
  });
}

// A collective that has begun. It keeps the tensors until somebody has waited for it, as with NCCL.
class Begun final : public c10d::Work {
 public:
  Begun(Tensors held, Tensors written, std::optional<Event> end, Works inner)
      : held_(std::move(held)), written_(std::move(written)), end_(std::move(end)), inner_(std::move(inner)) {}

  bool wait(std::chrono::milliseconds) override {
    for (auto& work : inner_)
      if (work) work->wait();
    inner_.clear();
    if (end_) simdev::wait(current_stream(), *end_);
    held_.clear();
    written_.clear();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  bool isCompleted() override { return !end_ || wall::is_over(end_->mark); }
  bool isSuccess() const override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    // A waiter's stream waits, as with NCCL: markCompleted records an event on the current stream.
    std::vector<c10::Device> devices;
    if (end_) devices.emplace_back(c10::DeviceType::PrivateUse1, 0);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    const int before = exchange_stream(end_ ? end_->stream : current_stream());
    future->markCompleted(written_);
    exchange_stream(before);
    return future;
  }

 private:
  Tensors held_, written_;
  std::optional<Event> end_;
  Works inner_;
};

class Group final : public c10d::Backend {
 public:
  Group(int rank, int size, const c10::intrusive_ptr<c10d::Backend>& gloo, std::chrono::milliseconds timeout)
      : Backend(rank, size),
        transport_(gloo ? through_gloo(gloo) : to_itself(rank, size)),
        options_(c10::make_intrusive<Options>(gloo ? "simccl" : "simcount", timeout)),
        stream_(new_stream(/*high_priority=*/false)) {}

  const std::string getBackendName() const override { return options_->backend; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const bool root = options.rootRank == getRank();
    const Tensors read = root ? tensors : Tensors{}, written = root ? Tensors{} : tensors;
    return run("broadcast", options.asyncOp, read, written, root ? bytes_of(tensors) : 0, [&] {
      for (const auto& tensor : tensors) transport_->broadcast(flat_on_host(tensor), static_cast<int>(options.rootRank));
    });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const int64_t sent = 2 * (getSize() - 1) * bytes_of(tensors) / getSize();
    return run("all_reduce", options.asyncOp, tensors, tensors, sent, [&] {
      for (const auto& tensor : tensors) reduce_all(flat_on_host(tensor), options.reduceOp);
    });
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const bool root = options.rootRank == getRank();
    return run("reduce", options.asyncOp, tensors, root ? tensors : Tensors{}, root ? 0 : bytes_of(tensors), [&] {
      for (const auto& tensor : tensors) {
        const at::Tensor flat = flat_on_host(tensor), sum = root ? flat : flat.clone();
        reduce_all(sum, options.reduceOp);
      }
    });
  }

  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    return run("all_gather", options.asyncOp, in, out[0], (getSize() - 1) * bytes_of(in), [&] {
      gather_all(flat_on_host(in[0]), flat_on_host(out[0]));
    });
  }

  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    TORCH_CHECK(out.numel() == in.numel() * getSize(), "all_gather of ", in.numel(), " elements on ", getSize(), " ranks needs an output of as many times that; got ", out.numel());
    return run("all_gather", options.asyncOp, {in}, {out}, (getSize() - 1) * bytes_of({in}), [&] {
      transport_->gather(flat_on_host(in), equal_parts(flat_on_host(out)));
    });
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    return run("all_gather", options.asyncOp, in, out, (getSize() - 1) * bytes_of(in), [&] {
      for (size_t i = 0; i < in.size(); ++i) transport_->gather(flat_on_host(in[i]), equal_parts(flat_on_host(out[i])));
    });
  }

  WorkPtr gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) override {
    const bool root = options.rootRank == getRank();
    return run("gather", options.asyncOp, in, root ? out[0] : Tensors{}, root ? 0 : bytes_of(in), [&] {
      const at::Tensor own = flat_on_host(in[0]);
      Tensors all = root ? flat_on_host(out[0]) : Tensors{};
      if (!root) for (int i = 0; i < getSize(); ++i) all.push_back(at::empty_like(own));
      transport_->gather(own, all);
    });
  }

  WorkPtr scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override {
    const bool root = options.rootRank == getRank();
    const Tensors read = root ? in[0] : Tensors{};
    return run("scatter", options.asyncOp, read, out, bytes_of(read), [&] {
      const at::Tensor own = flat_on_host(out[0]);
      for (int rank = 0; rank < getSize(); ++rank) {
        const at::Tensor part = root ? flat_on_host(in[0][rank]) : at::empty_like(own);
        transport_->broadcast(part, static_cast<int>(options.rootRank));
        if (rank == getRank()) own.copy_(part);
      }
    });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(in.numel() == out.numel() * getSize(), "reduce_scatter to ", out.numel(), " elements on ", getSize(), " ranks needs an input of as many times that; got ", in.numel());
    return run("reduce_scatter", options.asyncOp, {in}, {out}, bytes_of({in}) - bytes_of({out}), [&] {
      scatter_sums(flat_on_host(in), flat_on_host(out), options.reduceOp);
    });
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) override {
    return run("reduce_scatter", options.asyncOp, in, out, bytes_of(in) - bytes_of(out), [&] {
      for (size_t i = 0; i < in.size(); ++i) scatter_sums(flat_on_host(in[i]), flat_on_host(out[i]), options.reduceOp);
    });
  }

  WorkPtr reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& options) override {
    return run("reduce_scatter", options.asyncOp, in[0], out, bytes_of(in[0]) - bytes_of(out), [&] {
      scatter_sums(at::cat(flat_on_host(in[0])), flat_on_host(out[0]), options.reduceOp);
    });
  }

  WorkPtr alltoall_base(
      at::Tensor& out, at::Tensor& in, Splits& out_splits, Splits& in_splits, const c10d::AllToAllOptions& options) override {
    return run("all_to_all", options.asyncOp, {in}, {out}, bytes_of({in}) - bytes_of({in}) / getSize(), [&] {
      transport_->exchange(flat_on_host(in), flat_on_host(out), elements(in, in_splits), elements(out, out_splits));
    });
  }

  WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& options) override {
    return run("all_to_all", options.asyncOp, in, out, bytes_of(in) - bytes_of({in[getRank()]}), [&] {
      const Tensors from = flat_on_host(in), to = flat_on_host(out);
      const at::Tensor arrived = at::empty({std::accumulate(to.begin(), to.end(), int64_t{0}, [](int64_t sum, const at::Tensor& t) { return sum + t.numel(); })}, to[0].options());
      transport_->exchange(at::cat(from), arrived, lengths(from), lengths(to));
      int64_t at = 0;
      for (const auto& tensor : to) {
        tensor.copy_(arrived.narrow(0, at, tensor.numel()));
        at += tensor.numel();
      }
    });
  }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    Works inner;
    auto work = run("send", true, tensors, {}, bytes_of(tensors), [&] {
      for (const auto& tensor : tensors) inner.push_back(transport_->send(flat_on_host(tensor), to, tag));
    }, &inner);
    return work;
  }

  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    Works inner;
    auto work = run("receive", true, {}, tensors, 0, [&] {
      for (const auto& tensor : tensors) inner.push_back(transport_->receive(flat_on_host(tensor), from, tag));
    }, &inner);
    return work;
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return run("barrier", options.asyncOp, {}, {}, 0, [&] { transport_->barrier(); });
  }

  // Coalesced operations are one kernel, which begins with endCoalescing.
  void startCoalescing() override { together_.emplace(); }

  WorkPtr endCoalescing() override {
    Together all = std::move(*together_);
    together_.reset();
    return launch(all.name.empty() ? "nothing" : all.name, true, all.read, all.written, all.sent_bytes, [&] {
      for (auto& move : all.moves) move();
    }, std::move(all.inner));
  }

 private:
  struct Together {
    std::string name{};
    Tensors read{}, written{};
    int64_t sent_bytes = 0;
    std::vector<std::function<void()>> moves{};
    Works inner{};
  };

  // Between startCoalescing and endCoalescing, sends and receives begin immediately, and end with all others.
  template <typename Move>
  WorkPtr run(
      const char* name, bool async, const Tensors& read, const Tensors& written, int64_t sent_bytes, Move move,
      Works* inner = nullptr) {
    ++sequence_;
    if (!together_) {
      if (is_movable(read, written)) after_all_before(move);
      return launch(name, async, read, written, sent_bytes, [] {}, inner == nullptr ? Works{} : std::move(*inner));
    }
    Together& all = *together_;
    all.name = inner == nullptr ? name : "send and receive";
    all.read.insert(all.read.end(), read.begin(), read.end());
    all.written.insert(all.written.end(), written.begin(), written.end());
    all.sent_bytes += sent_bytes;
    if (is_movable(read, written)) after_all_before(move);
    if (inner != nullptr) all.inner.insert(all.inner.end(), inner->begin(), inner->end());
    return c10::make_intrusive<Begun>(Tensors{}, Tensors{}, std::nullopt, Works{});
  }

  // Tells clocks, checker and recorder: [Note: Collectives].
  template <typename Move>
  WorkPtr launch(
      const std::string& name, bool async, const Tensors& read, const Tensors& written, int64_t sent_bytes, Move move,
      Works inner) {
    move();
    const bool device = is_on_device(read, written);
    const bool known = is_movable(read, written);
    for (const auto& tensor : written)
      if (on_device(tensor)) wrote(tensor, known);
    const int stream = async && device ? stream_ : current_stream();
    if (stream != current_stream()) follow(stream, current_stream());
    wall::wait(stream, last_);  // kernels of one communicator run in the order of launch
    report(name, read, written, sent_bytes, stream, device);
    if (wall::on() && !known) load(name, sent_bytes, stream);
    std::optional<Event> end;
    if (stream != current_stream()) record(end.emplace(), stream);
    Tensors held = read;
    held.insert(held.end(), written.begin(), written.end());
    return c10::make_intrusive<Begun>(std::move(held), written, std::move(end), std::move(inner));
  }

  // On a wall clock, the host waits before it exchanges known values: [Note: Words].
  template <typename Move>
  void after_all_before(const Move& move) const {
    wall::host_waits(wall::mark(current_stream()));
    wall::host_waits(last_);
    move();
  }

  // Takes the links' time for unknown values: [Note: Wall clock]. Operations that only set up a model take none.
  void load(const std::string& name, int64_t sent_bytes, int stream) {
    static const std::set<std::string> loads{"all_gather", "reduce_scatter", "all_reduce", "all_to_all"};
    const int messages = (name == "all_reduce" ? 2 : 1) * (getSize() - 1);
    if (messages == 0 || loads.count(name) == 0) return;
    const int64_t bytes = std::max<int64_t>(1, sent_bytes / messages);
    wall::run(stream, [=, transport = transport_] { transport->load(bytes, messages, name == "all_to_all"); });
    last_ = wall::mark(stream);
  }

  static void follow(int stream, int other) {
    Event before;
    record(before, other);
    simdev::wait(stream, before);
  }

  void report(
      const std::string& name, const Tensors& read, const Tensors& written, int64_t sent_bytes, int stream, bool device) const {
    if (!device) return;
    launch_collective(stream);
    std::vector<Touch> touches;
    for (const auto& tensor : read) add_touch(touches, tensor, false);
    for (const auto& tensor : written) add_touch(touches, tensor, true);
    if (name == "all_gather" && touches.size() == 2) leave_own_part(touches);
    checker::access(name, touches, stream);
    recorder::collective(name, getSize(), sent_bytes, stream, getGroupDesc());
  }

  // A gather in place does not write the part that it sends. `touches`: [the bytes read, the bytes written].
  static void leave_own_part(std::vector<Touch>& touches) {
    const Touch own = touches[0], all = touches[1];
    if (own.block != all.block || own.begin < all.begin || all.end < own.end) return;
    touches.pop_back();
    if (all.begin < own.begin) touches.push_back({all.block, all.begin, own.begin, true});
    if (own.end < all.end) touches.push_back({all.block, own.end, all.end, true});
  }

  static bool is_on_device(const Tensors& read, const Tensors& written) {
    for (const auto* tensors : {&read, &written})
      for (const auto& tensor : *tensors)
        if (on_device(tensor)) return true;
    return false;
  }

  // Whether there are values to move: [Note: Words].
  static bool is_movable(const Tensors& read, const Tensors& written) {
    for (const auto& tensor : read)
      if (on_device(tensor) && !is_known(tensor)) return false;
    for (const auto& tensor : written)
      if (on_device(tensor) && !is_backed(tensor)) return false;
    return true;
  }

  void reduce_all(const at::Tensor& flat, const c10d::ReduceOp& op) {
    Tensors terms{flat};
    if (counts()) return transport_->reduce(terms, flat, op);
    const at::Tensor all = at::empty({getSize() * flat.numel()}, flat.options());
    terms = equal_parts(all);
    transport_->gather(flat, terms);
    transport_->reduce(terms, flat, op);
  }

  void scatter_sums(const at::Tensor& in, const at::Tensor& out, const c10d::ReduceOp& op) {
    if (counts()) return transport_->reduce({equal_parts(in)[getRank()]}, out, op);
    const at::Tensor all = at::empty_like(in);
    transport_->exchange(in, all, elements(in, {}), elements(all, {}));
    transport_->reduce(equal_parts(all), out, op);
  }

  void gather_all(const at::Tensor& own, const Tensors& out) {
    bool even = true;
    for (const auto& tensor : out) even = even && tensor.numel() == own.numel();
    if (even) return transport_->gather(own, out);
    for (int rank = 0; rank < getSize(); ++rank) {
      if (rank == getRank()) at::Tensor(out[rank]).copy_(own);
      transport_->broadcast(out[rank], rank);
    }
  }

  bool counts() const { return options_->backend == "simcount"; }

  Tensors equal_parts(const at::Tensor& flat) const {
    Tensors parts;
    const int64_t length = flat.numel() / getSize();
    for (int i = 0; i < getSize(); ++i) parts.push_back(flat.narrow(0, i * length, length));
    return parts;
  }

  // Elements of each rank's part. `splits` count slices of the first dimension; if empty, parts are equal.
  Splits elements(const at::Tensor& tensor, const Splits& splits) const {
    if (splits.empty()) return Splits(getSize(), tensor.numel() / getSize());
    const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
    const int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
    Splits lengths = splits;
    for (auto& length : lengths) length *= row;
    return lengths;
  }

  static Splits lengths(const Tensors& tensors) {
    Splits all;
    for (const auto& tensor : tensors) all.push_back(tensor.numel());
    return all;
  }

  std::shared_ptr<Transport> transport_;  // running jobs hold it as well
  c10::intrusive_ptr<Options> options_;
  int stream_;
  uint64_t sequence_ = 0;
  wall::MarkPtr last_{};  // end of the last collective on a wall clock
  std::optional<Together> together_{};
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_group(
    int rank, int size, const c10::intrusive_ptr<c10d::Backend>& gloo, std::chrono::milliseconds timeout) {
  return c10::make_intrusive<Group>(rank, size, gloo, timeout);
}

}  // namespace simdev
