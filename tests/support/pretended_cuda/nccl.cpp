// A process group backend with NCCL's behaviour: it takes CUDA tensors only, and sends them over gloo.
#include "devices.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/library.h>

namespace pretended {
namespace {

using at::Tensor;
using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;
using Tensors = std::vector<Tensor>;

// Work that is done, or that is done when gloo's is.
class HostWork final : public Work {
 public:
  explicit HostWork(Tensors results, WorkPtr gloo = {}, Tensors kept = {})
      : results_(std::move(results)), gloo_(std::move(gloo)), kept_(std::move(kept)) {}
  bool isCompleted() override { return !gloo_ || gloo_->isCompleted(); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override { return !gloo_ || gloo_->wait(timeout); }
  void synchronize() override { wait(); }
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait();
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(results_));
    return future;
  }

 private:
  Tensors results_;
  WorkPtr gloo_;
  Tensors kept_;  // the host views that gloo reads or writes
};

WorkPtr done(Tensors results) { return c10::make_intrusive<HostWork>(std::move(results)); }

class PretendedNccl final : public c10d::Backend {
 public:
  explicit PretendedNccl(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override {
    auto child = gloo_->split(store, ranks, options);
    return child ? c10::make_intrusive<PretendedNccl>(std::move(child)) : nullptr;
  }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto hosts = enter("broadcast", tensors);
    gloo_->broadcast(hosts, options)->wait();
    return done(tensors);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    for (const Tensor& host : enter("allreduce", tensors)) host.copy_(reduced(host, options.reduceOp));
    return done(tensors);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    for (const Tensor& host : enter("reduce", tensors)) {
      const Tensor total = reduced(host, options.reduceOp);
      if (getRank() == options.rootRank) host.copy_(total);
    }
    return done(tensors);
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    const auto own = enter("allgather", inputs);
    for (size_t i = 0; i < own.size(); ++i) {
      const auto hosts = enter("", outputs[i]);
      const auto parts = gathered(own[i]);
      for (size_t rank = 0; rank < parts.size(); ++rank) hosts[rank].copy_(parts[rank]);
    }
    return done(outputs[0]);
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions&) override {
    const auto hosts = enter("allgather", {input, output});
    hosts[1].view(-1).copy_(at::cat(flat(gathered(hosts[0]))));
    return done({output});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < inputs.size(); ++i) _allgather_base(outputs[i], inputs[i], options);
    return done(outputs);
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    const auto hosts = enter("reduce_scatter", {input, output});
    hosts[1].view(-1).copy_(reduced(hosts[0], options.reduceOp).view(-1).chunk(getSize())[getRank()]);
    return done({output});
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < inputs.size(); ++i) _reduce_scatter_base(outputs[i], inputs[i], options);
    return done(outputs);
  }

  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    auto hosts = enter("alltoall", {input, output});
    gloo_->alltoall_base(hosts[1], hosts[0], output_sizes, input_sizes, options)->wait();
    return done({output});
  }

  // Both return at once, as in NCCL: the results are there after wait().
  WorkPtr send(Tensors& tensors, int rank, int tag) override {
    auto hosts = enter("send", tensors);
    auto work = gloo_->send(hosts, rank, tag);
    return c10::make_intrusive<HostWork>(tensors, work, hosts);
  }
  WorkPtr recv(Tensors& tensors, int rank, int tag) override {
    auto hosts = enter("recv", tensors);
    auto work = gloo_->recv(hosts, rank, tag);
    return c10::make_intrusive<HostWork>(tensors, work, hosts);
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    count_collective("barrier");
    note("wait barrier");  // NCCL's holds the host
    gloo_->barrier()->wait();
    return done({});
  }

 private:
  // Count a collective and return host views of its tensors.
  static Tensors enter(const char* name, const Tensors& tensors) {
    if (*name) count_collective(name);
    Tensors hosts;
    for (const Tensor& tensor : tensors) {
      TORCH_CHECK(tensor.is_cuda(), "Tensors must be CUDA and dense");
      TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
      run_pending_copies(tensor.device().index());
      hosts.push_back(host_view(tensor));
    }
    return hosts;
  }

  // The sum or mean over the ranks, in fp32 for 16-bit types, which gloo does not add. It is on no memory of `host`.
  Tensor reduced(const Tensor& host, const c10d::ReduceOp& op) const {
    const bool is_narrow = host.scalar_type() == at::kBFloat16 || host.scalar_type() == at::kHalf;
    Tensors total{is_narrow ? host.to(at::kFloat) : host.clone()};
    const bool is_mean = op == c10d::ReduceOp::AVG;
    c10d::AllreduceOptions options;
    options.reduceOp = is_mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    gloo_->allreduce(total, options)->wait();
    return is_mean ? total[0].div(getSize()) : total[0];
  }

  Tensors gathered(const Tensor& host) const {
    Tensors own{host.contiguous()};
    std::vector<Tensors> parts(1);
    for (int rank = 0; rank < getSize(); ++rank) parts[0].push_back(at::empty_like(own[0]));
    gloo_->allgather(parts, own)->wait();
    return parts[0];
  }

  static Tensors flat(const Tensors& tensors) {
    Tensors flattened;
    for (const Tensor& tensor : tensors) flattened.push_back(tensor.view(-1));
    return flattened;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};

// Give a group that has gloo for the CPU this backend for CUDA.
void add_nccl(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const auto gloo = group->getBackend(c10::DeviceType::CPU);
  group->setBackend(
      c10::DeviceType::CUDA, c10d::ProcessGroup::BackendType::NCCL, c10::make_intrusive<PretendedNccl>(gloo));
}

}  // namespace
}  // namespace pretended

TORCH_LIBRARY_FRAGMENT(pretended_cuda, m) {
  m.def("add_nccl(__torch__.torch.classes.c10d.ProcessGroup group) -> ()", &pretended::add_nccl);
}
