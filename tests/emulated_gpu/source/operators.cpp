// torch's operators for the CUDA key: each queues the CPU's kernel on the current stream, on the same bytes.
//
// Only pointers are queued and no tensors, so that memory which is freed or reused too early shows, as on a GPU. This is
// the only file that depends on torch's internals.
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstdlib>
#include <mutex>
#include <set>
#include <unordered_map>

#include "device.h"

namespace {
using at::Tensor;
using c10::IValue;
using torch::jit::Stack;
using emulated::Range;
constexpr auto CUDA = c10::DeviceType::CUDA;

c10::Device current_device() { return {CUDA, c10::impl::VirtualGuardImpl(CUDA).getDevice().index()}; }
emulated::Stream* current_stream(c10::Device device) {
  c10::impl::VirtualGuardImpl guard(CUDA);
  auto before = guard.exchangeDevice(device);  // a default stream's handle is null, which means that of the current device
  auto* stream = emulated::stream_of(guard.getStreamNativeHandle(guard.getStream(device)));
  guard.uncheckedSetDevice(before);
  return stream;
}
void check(emulated::Code code) { TORCH_CHECK(code == 0, "CUDA error: ", emulated::text_of(code)); }

bool is_on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == CUDA; }

// The device's bytes as a CPU tensor that owns nothing; of a CPU tensor one that no Python object belongs to, because a
// stream's thread, which lets go of it, would wait for the GIL of a thread that waits for the stream.
Tensor host_view(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (!is_on_device(tensor)) return Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(0, true));
  bool has_memory = tensor.numel() || tensor.has_storage();
  void* bytes = has_memory ? emulated::bytes_at(tensor.const_data_ptr()) : nullptr;
  auto options = tensor.options().device(c10::kCPU).requires_grad(false);
  auto made = at::from_blob(bytes, tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}
Tensor shape_of(const Tensor& tensor) {
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  auto options = tensor.options().device(c10::kMeta).requires_grad(false);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}
void note_range(const Tensor& tensor, std::vector<Range>& ranges, emulated::Use use) {
  if (!is_on_device(tensor) || !tensor.numel()) return;
  size_t size = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size());
  bool is_dense = tensor.is_non_overlapping_and_dense();
  ranges.push_back({tensor.const_data_ptr(), size, is_dense ? use : emulated::Use::Scattered});
}

template <class F>
void each_tensor(const IValue& value, F&& visit) {
  if (value.isTensor()) visit(value.toTensor());
  else if (value.isTensorList())
    for (const Tensor& tensor : value.toTensorVector()) visit(tensor);
  else if (value.isOptionalTensorList())
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
      if (tensor) visit(*tensor);
}
template <class F>
IValue mapped(const IValue& value, F&& tensor, c10::Device device) {
  if (value.isTensor()) return tensor(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor& each : value.toTensorVector()) out.push_back(tensor(each));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (const std::optional<Tensor>& each : value.toOptionalTensorList())
      out.push_back(each ? std::optional<Tensor>(tensor(*each)) : each);
    return out;
  }
  if (value.isDevice()) return device;
  if (value.isGenerator()) return IValue();
  return value;
}
std::optional<c10::Device> device_in(const IValue& value) {
  std::optional<c10::Device> found;
  each_tensor(value, [&](const Tensor& tensor) {
    if (!found && is_on_device(tensor)) found = tensor.device();
  });
  if (!found && value.isDevice() && value.toDevice().type() == CUDA)
    found = value.toDevice().has_index() ? value.toDevice() : current_device();
  return found;
}

// What an operator's schema tells of it.
struct Plan {
  bool waits = false;        // what it returns depends on values, or there is no way to ask for shapes alone
  bool is_fresh = false;     // it makes tensors
  std::vector<int> written;  // by return value: the argument that it is, or -1
  std::vector<int> outs;     // the arguments that an out= variant writes
};
bool is_written(const c10::Argument& argument) {
  const auto* alias = argument.alias_info();
  if (!alias) return false;
  const auto& elements = alias->containedTypes();  // of a list
  return alias->isWrite() || std::any_of(elements.begin(), elements.end(), [](const auto& each) { return each.isWrite(); });
}
Plan make_plan(const c10::OperatorHandle& op) {
  Plan plan;
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  for (const auto& result : schema.returns()) {
    int source = -1;
    if (const auto* alias = result.alias_info(); alias && alias->isWrite())
      for (size_t i = 0; i < arguments.size(); i++)
        if (const auto* other = arguments[i].alias_info(); other && other->beforeSets() == alias->beforeSets())
          source = int(i);
    plan.written.push_back(source);
    if (source >= 0) continue;
    bool is_tensor = result.type()->isSubtypeOf(*c10::TensorType::get()) ||
                     result.type()->isSubtypeOf(*c10::ListType::ofTensors());
    (is_tensor ? plan.is_fresh : plan.waits) = true;
  }
  for (size_t i = 0; i < arguments.size(); i++)
    if (arguments[i].is_out()) plan.outs.push_back(int(i));
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::Meta) && (plan.is_fresh || !plan.outs.empty())) plan.waits = true;
  return plan;
}
const Plan& plan_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static std::unordered_map<c10::OperatorName, Plan> plans;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = plans.find(op.operator_name());
  return found != plans.end() ? found->second : plans.emplace(op.operator_name(), make_plan(op)).first->second;
}

void run_on_cpu(const c10::OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}
void assign(const IValue& to, const IValue& from) {
  if (to.isTensor()) {
    if (to.toTensor().defined() && to.toTensor().numel()) to.toTensor().copy_(from.toTensor());
  } else if (to.isTensorList()) {
    auto targets = to.toTensorVector(), values = from.toTensorVector();
    for (size_t i = 0; i < targets.size(); i++)
      if (targets[i].numel()) targets[i].copy_(values[i]);
  }
}

// Return the new tensors that an operator will write, made from shapes alone; nothing where values are needed.
std::optional<Stack> make_results(const c10::OperatorHandle& op, const Plan& plan, const Stack& arguments,
                                  c10::Device device) {
  if (plan.waits) return std::nullopt;
  Stack results;
  if (!plan.is_fresh && plan.outs.empty()) return results;
  Stack shapes;
  for (const IValue& value : arguments) shapes.push_back(mapped(value, shape_of, c10::Device(c10::kMeta)));
  Stack given = shapes;
  try {
    at::AutoDispatchBelowADInplaceOrView guard;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &shapes);
  } catch (...) {  // no shape without the values, or bad arguments, which the CPU's kernel will name
    return std::nullopt;
  }
  auto on_device = [&](const Tensor& shape) -> Tensor {
    return shape.defined() ? at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(device)) : shape;
  };
  for (const IValue& value : shapes) results.push_back(mapped(value, on_device, device));
  for (int i : plan.outs)
    if (arguments[i].isTensor() && arguments[i].toTensor().sizes() != given[i].toTensor().sizes())
      arguments[i].toTensor().resize_(given[i].toTensor().sizes());
  return results;
}

void run_now(const c10::OperatorHandle& op, const Plan& plan, const Stack& arguments, c10::Device device,
             Stack& made, Stack* stack) {
  run_on_cpu(op, made);
  for (size_t i = 0; i < made.size(); i++) {
    if (plan.written[i] >= 0) {
      stack->push_back(arguments[plan.written[i]]);
      continue;
    }
    auto on_device = [&](const Tensor& value) -> Tensor {
      return value.defined() ? at::empty_strided(value.sizes(), value.strides(), value.options().device(device)) : value;
    };
    IValue result = mapped(made[i], on_device, device);
    assign(mapped(result, host_view, c10::Device(c10::kCPU)), made[i]);
    stack->push_back(result);
  }
}

void boxed(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const Plan& plan = plan_of(op);
  size_t count = op.schema().arguments().size();
  Stack arguments(stack->end() - count, stack->end());
  torch::jit::drop(*stack, count);
  std::optional<c10::Device> found;
  for (const IValue& value : arguments)
    if (!found) found = device_in(value);
  c10::Device device = found ? *found : current_device();
  auto* stream = current_stream(device);
  const char* name = op.schema().name().c_str();
  if (emulated::traces()) emulated::say("%s on stream %p", name, (void*)stream);

  std::optional<Stack> results = make_results(op, plan, arguments, device);
  Stack on_host;
  for (const IValue& value : arguments) on_host.push_back(mapped(value, host_view, c10::Device(c10::kCPU)));
  if (!results) {
    check(emulated::synchronize(stream));
    run_now(op, plan, arguments, device, on_host, stack);
    return;
  }
  std::vector<Range> touched;
  for (size_t i = 0; i < arguments.size(); i++) {
    auto use = is_written(op.schema().arguments()[i]) ? emulated::Use::Write : emulated::Use::Read;
    each_tensor(arguments[i], [&](const Tensor& tensor) { note_range(tensor, touched, use); });
  }
  Stack targets;
  for (const IValue& value : *results) {
    each_tensor(value, [&](const Tensor& tensor) { note_range(tensor, touched, emulated::Use::Write); });
    targets.push_back(mapped(value, host_view, c10::Device(c10::kCPU)));
  }
  auto task = [op, on_host, targets, written = plan.written, name, index = device.index()] {
    try {
      Stack work = on_host;
      run_on_cpu(op, work);
      for (size_t i = 0; i < targets.size(); i++)
        if (written[i] < 0) assign(targets[i], work[i]);
    } catch (const std::exception& error) {
      emulated::say("%s failed on device %d: %s", name, int(index), error.what());
      emulated::fail_device(index, emulated::LAUNCH_FAILURE);
    }
  };
  check(emulated::enqueue(stream, task, touched, name));
  for (size_t i = 0; i < plan.written.size(); i++)
    stack->push_back(plan.written[i] >= 0 ? arguments[plan.written[i]] : (*results)[i]);
}

// Copies: CUDA's own copy where the bytes stay as they are, and a queued conversion otherwise.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  Tensor from = source.expand_as(self);
  bool is_plain = self.dtype() == from.dtype() && self.is_contiguous() && from.is_contiguous() &&
                  self.is_conj() == from.is_conj() && self.is_neg() == from.is_neg();
  if (is_plain && (self.device() == from.device() || self.is_cpu() || from.is_cpu()))
    return at::native::copy_(self, from, non_blocking);
  auto device = is_on_device(self) ? self.device() : from.device();
  auto* stream = current_stream(device);
  if (is_on_device(from) && from.device() != device) check(emulated::synchronize(current_stream(from.device())));
  Tensor target = host_view(self);
  Tensor values = from.is_cpu() && !from.is_pinned() ? from.clone() : host_view(from);
  std::vector<Range> touched;
  note_range(self, touched, emulated::Use::Write);
  note_range(from, touched, emulated::Use::Read);
  auto task = [=] {
    at::AutoDispatchBelowADInplaceOrView guard;
    Tensor written = target;
    written.copy_(values);
  };
  check(emulated::enqueue(stream, task, touched, "aten::copy_"));
  bool crosses = self.is_cpu() || from.is_cpu();
  if (crosses && (!non_blocking || (self.is_cpu() && !self.is_pinned()))) check(emulated::synchronize(stream));
  return self;
}

// What torch's allocator hands out and takes back; it calls this while it holds its lock.
void watch_allocator() {
  using Entry = c10::CachingDeviceAllocator::TraceEntry;
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const Entry& entry) {
    auto* pointer = (void*)entry.addr_;
    if (entry.action_ == Entry::ALLOC || entry.action_ == Entry::SEGMENT_ALLOC || entry.action_ == Entry::SEGMENT_FREE)
      emulated::memory_handed_out(pointer, entry.size_);
    else if (entry.action_ == Entry::FREE_COMPLETED)
      emulated::memory_taken_back(pointer, entry.size_, entry.stream_, entry.device_);
  });
}

struct Quiet : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// metadata and allocation, whose CUDA kernels launch nothing
const std::set<std::string> KEPT = {
    "aten::empty",       "aten::empty_strided", "aten::set_",           "aten::resize_",
    "aten::record_stream", "aten::_local_scalar_dense", "aten::is_pinned", "aten::_pin_memory",
    "aten::set_data",    "aten::_resize_output_", "aten::copy_",        "aten::_copy_from",
};

int replace_operators() {
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);  // "overriding a previously registered kernel", for each
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  int count = 0;
  for (const auto& name : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    if (name.name.rfind("aten::", 0) != 0 || KEPT.count(name.name)) continue;
    auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || !op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    bool is_view = false;
    for (const auto& result : op->schema().returns())
      if (const auto* alias = result.alias_info(); alias && !alias->isWrite()) is_view = true;
    if (is_view) continue;
    std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&boxed>());
    count++;
  }
  library->impl("copy_", copy_);
  return count;
}
const int COUNT = replace_operators();
}  // namespace

extern "C" EXPORTED int emulated_gpu_operators() { return COUNT; }
extern "C" EXPORTED void emulated_gpu_watch_allocator() { watch_allocator(); }
