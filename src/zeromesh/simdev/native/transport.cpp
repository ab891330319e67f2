#include "transport.h"

#include <ATen/ATen.h>

namespace simdev {
namespace {

at::Tensor as_bytes(const at::Tensor& tensor) {
  void* data = tensor.numel() == 0 ? nullptr : tensor.data_ptr();
  return at::from_blob(data, {static_cast<int64_t>(tensor.nbytes())}, at::dtype(at::kByte));
}

Splits in_bytes(Splits splits, const at::Tensor& like) {
  for (auto& length : splits) length *= like.itemsize();
  return splits;
}

void wait_for(const c10::intrusive_ptr<c10d::Work>& work) { work->wait(); }

at::Tensor combined(const at::Tensor& a, const at::Tensor& b, const c10d::ReduceOp& op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::AVG: return a + b;
    case c10d::ReduceOp::PRODUCT: return a * b;
    case c10d::ReduceOp::MIN: return at::minimum(a, b);
    case c10d::ReduceOp::MAX: return at::maximum(a, b);
    case c10d::ReduceOp::BAND: return at::bitwise_and(a, b);
    case c10d::ReduceOp::BOR: return at::bitwise_or(a, b);
    case c10d::ReduceOp::BXOR: return at::bitwise_xor(a, b);
    default: TORCH_CHECK(false, "the simulated device's groups reduce by SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR and BXOR");
  }
}

bool is_narrow(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

at::Tensor wide(const at::Tensor& tensor) { return is_narrow(tensor) ? tensor.to(at::kFloat) : tensor; }

class Gloo final : public Transport {
 public:
  explicit Gloo(c10::intrusive_ptr<c10d::Backend> group) : group_(std::move(group)) {}

  void gather(const at::Tensor& in, std::vector<at::Tensor> out) override {
    std::vector<at::Tensor> from{as_bytes(in)};
    std::vector<std::vector<at::Tensor>> to(1);
    for (const auto& tensor : out) to[0].push_back(as_bytes(tensor));
    wait_for(group_->allgather(to, from));
  }

  void exchange(const at::Tensor& in, at::Tensor out, const Splits& in_splits, const Splits& out_splits) override {
    at::Tensor to = as_bytes(out), from = as_bytes(in);
    Splits leaving = in_bytes(in_splits, in), arriving = in_bytes(out_splits, out);
    wait_for(group_->alltoall_base(to, from, arriving, leaving));
  }

  void broadcast(at::Tensor tensor, int root) override {
    std::vector<at::Tensor> all{as_bytes(tensor)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    wait_for(group_->broadcast(all, options));
  }

  void reduce(const std::vector<at::Tensor>& terms, at::Tensor out, const c10d::ReduceOp& op) override {
    at::Tensor total = wide(terms[0]);
    for (size_t i = 1; i < terms.size(); ++i) total = combined(total, wide(terms[i]), op);
    if (op == c10d::ReduceOp::AVG) total = total / static_cast<double>(terms.size());
    out.copy_(total);
  }

  void barrier() override { wait_for(group_->barrier()); }

  // In a ring, each message goes on after one has arrived, as in gathers and reductions. Else one goes to each rank.
  void load(int64_t bytes, int messages, bool to_each) override {
    const int size = group_->getSize(), rank = group_->getRank();
    if (!sent_.defined() || sent_.numel() < bytes)
      sent_ = at::empty({bytes}, at::kByte), received_ = at::empty({bytes}, at::kByte);
    const auto distance = [to_each](int message) { return to_each ? message + 1 : 1; };
    Works arriving, leaving;
    for (int i = 0; i < messages; ++i)
      arriving.push_back(receive(received_.narrow(0, 0, bytes), (rank + size - distance(i)) % size, kLoad));
    for (int i = 0; i < messages; ++i) {
      leaving.push_back(send(sent_.narrow(0, 0, bytes), (rank + distance(i)) % size, kLoad));
      if (!to_each) wait_for(arriving[i]);
    }
    for (int i = 0; to_each && i < messages; ++i) wait_for(arriving[i]);
    for (const auto& work : leaving) wait_for(work);
  }

  c10::intrusive_ptr<c10d::Work> send(at::Tensor tensor, int to, int tag) override {
    std::vector<at::Tensor> all{as_bytes(tensor)};
    return group_->send(all, to, tag);
  }

  c10::intrusive_ptr<c10d::Work> receive(at::Tensor tensor, int from, int tag) override {
    std::vector<at::Tensor> all{as_bytes(tensor)};
    return group_->recv(all, from, tag);
  }

 private:
  static constexpr int kLoad = 0x10ad;  // tag of these messages

  c10::intrusive_ptr<c10d::Backend> group_;
  at::Tensor sent_{}, received_{};
};

class Itself final : public Transport {
 public:
  Itself(int rank, int size) : rank_(rank), size_(size) {}

  void gather(const at::Tensor& in, std::vector<at::Tensor> out) override {
    for (auto& tensor : out)
      if (tensor.numel() != 0 && tensor.data_ptr() != in.data_ptr()) tensor.copy_(in);
  }

  // All ranks are assumed to send this one the part that it has for itself.
  void exchange(const at::Tensor& in, at::Tensor out, const Splits& in_splits, const Splits& out_splits) override {
    int64_t begin = 0;
    for (int rank = 0; rank < rank_; ++rank) begin += in_splits[rank];
    const at::Tensor own = in.narrow(0, begin, in_splits[rank_]);
    int64_t at = 0;
    for (const int64_t length : out_splits) {
      if (length == own.numel()) out.narrow(0, at, length).copy_(own);
      at += length;
    }
  }

  void broadcast(at::Tensor, int) override {}

  void reduce(const std::vector<at::Tensor>& terms, at::Tensor out, const c10d::ReduceOp& op) override {
    if (op == c10d::ReduceOp::SUM)
      out.copy_(wide(terms[0]) * size_);
    else if (op == c10d::ReduceOp::PRODUCT)
      out.copy_(wide(terms[0]).pow(size_));
    else if (out.data_ptr() != terms[0].data_ptr())
      out.copy_(terms[0]);
  }

  void barrier() override {}
  void load(int64_t, int, bool) override {}
  c10::intrusive_ptr<c10d::Work> send(at::Tensor, int, int) override { return nullptr; }
  c10::intrusive_ptr<c10d::Work> receive(at::Tensor, int, int) override { return nullptr; }

 private:
  int rank_, size_;
};

}  // namespace

std::unique_ptr<Transport> through_gloo(c10::intrusive_ptr<c10d::Backend> gloo) {
  return std::make_unique<Gloo>(std::move(gloo));
}

std::unique_ptr<Transport> to_itself(int rank, int size) { return std::make_unique<Itself>(rank, size); }

}  // namespace simdev
