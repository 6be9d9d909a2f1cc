// Hot operators. A template makes a kernel from libtorch's own declaration of the operator, so that arguments need not
// go through the boxes of the dispatcher.
#include "hpu/abi.h"
#include "hpu/alias.h"
#include "hpu/fast_ops.h"

#include <ATen/core/IListRef.h>

#include <tuple>
#include <utility>

namespace voltaic::hpu {
namespace {

// Enter<T>::enter gives what stands for an argument of type T during the call; Enter<T>::pass what the kernel gets.
template <class T> struct Enter {
  static T &&enter(OpCall &, T &&value) { return std::forward<T>(value); }
  static T &&pass(T &value) { return std::forward<T>(value); }
};

template <> struct Enter<const Tensor &> {
  static c10::MaybeOwned<Tensor> enter(OpCall &call, const Tensor &tensor) {
    return call.enter_borrowed(tensor, Use::read);
  }
  static const Tensor &pass(const c10::MaybeOwned<Tensor> &tensor) { return *tensor; }
};

template <> struct Enter<Tensor &> {
  static Tensor enter(OpCall &call, Tensor &tensor) { return call.enter(tensor, Use::write); }
  static Tensor &pass(Tensor &tensor) { return tensor; }
};

template <> struct Enter<const std::optional<Tensor> &> {
  static std::optional<Tensor> enter(OpCall &call, const std::optional<Tensor> &tensor) {
    if (!tensor.has_value() || !tensor->defined())
      return std::nullopt;
    return call.enter(*tensor, Use::read);
  }
  static const std::optional<Tensor> &pass(std::optional<Tensor> &tensor) { return tensor; }
};

template <class List> std::vector<Tensor> enter_list(OpCall &call, const List &list) {
  std::vector<Tensor> entered;
  entered.reserve(list.size());
  for (const Tensor &tensor : list)
    entered.push_back(call.enter(tensor, Use::read));
  return entered;
}

template <> struct Enter<at::TensorList> {
  static std::vector<Tensor> enter(OpCall &call, at::TensorList list) { return enter_list(call, list); }
  static at::TensorList pass(std::vector<Tensor> &list) { return list; }
};

template <> struct Enter<const at::ITensorListRef &> {
  static std::vector<Tensor> enter(OpCall &call, const at::ITensorListRef &list) { return enter_list(call, list); }
  static at::ITensorListRef pass(std::vector<Tensor> &list) { return list; }
};

// The generator follows the tensors among the arguments of the operators below, so the device is known.
template <> struct Enter<std::optional<at::Generator>> {
  static std::optional<at::Generator> enter(OpCall &call, std::optional<at::Generator> generator) {
    return cpu_generator(generator, call.device());
  }
  static std::optional<at::Generator> pass(std::optional<at::Generator> &generator) { return generator; }
};

void leave(OpCall &call, Tensor &result) { call.leave(result); }
void leave(OpCall &call, std::vector<Tensor> &results) {
  for (Tensor &result : results)
    call.leave(result);
}
template <class... T> void leave(OpCall &call, std::tuple<T...> &results) {
  std::apply([&](auto &...result) { (leave(call, result), ...); }, results);
}
void leave(OpCall &, at::Scalar &) {}

// The written argument that an in-place or out= operator returns: the last `Tensor &`.
Tensor *written(Tensor &tensor) { return &tensor; }
template <class T> Tensor *written(T &&) { return nullptr; }
template <class... A> Tensor &last_written(A &&...arguments) {
  Tensor *found = nullptr;
  ((found = written(arguments) != nullptr ? written(arguments) : found), ...);
  return *found;
}

template <class Op, class Schema> struct FastKernel;

template <class Op, class R, class... A> struct FastKernel<Op, R(A...)> {
  static R run(A... arguments) {
    OpCall call(Op::name);
    return run_with(call, std::index_sequence_for<A...>{}, std::forward<A>(arguments)...);
  }

private:
  template <size_t... I> static R run_with(OpCall &call, std::index_sequence<I...>, A... arguments) {
    // braces: arguments enter from left to right
    std::tuple<decltype(Enter<A>::enter(call, std::forward<A>(arguments)))...> entered{
        Enter<A>::enter(call, std::forward<A>(arguments))...};
    const KernelScope scope(call);
    if constexpr (std::is_same_v<R, void>) {
      Op::redispatch(cpu_only, Enter<A>::pass(std::get<I>(entered))...);
      call.carry_over_writes();
    } else if constexpr (std::is_same_v<R, Tensor &>) {
      Op::redispatch(cpu_only, Enter<A>::pass(std::get<I>(entered))...);
      call.carry_over_writes();
      return last_written(std::forward<A>(arguments)...);
    } else {
      R result = Op::redispatch(cpu_only, Enter<A>::pass(std::get<I>(entered))...);
      call.carry_over_writes();
      leave(call, result);
      return result;
    }
  }
};

template <class Op> void add(torch::Library &library, Names &done) {
  std::string name = Op::name;
  if (Op::overload_name[0] != '\0')
    name += std::string(".") + Op::overload_name;
  library.impl(name.c_str(), torch::CppFunction::makeFromUnboxedFunction(&FastKernel<Op, typename Op::schema>::run));
  done.insert(name.substr(std::string("aten::").size()));
}

} // namespace

void register_fast(torch::Library &library, Names &done) {
#define VT_FAST(op) add<at::_ops::op>(library, done);
  VT_HPU_FAST_OPS(VT_FAST)
#undef VT_FAST
}

} // namespace voltaic::hpu
