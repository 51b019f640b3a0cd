// Tensors and operators over torch's stable C ABI.
//
// torch's own C++ headers for this ABI take as long to compile as all kernels together, so the few
// functions that kernels need are declared here. tests/kernels/cpu/test_binding.py compiles these
// declarations beside torch's. An operator gets its arguments as 64-bit words (`StableIValue`), which
// it owns.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

struct AtenTensorOpaque;
struct TorchLibraryOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
using TorchLibraryHandle = TorchLibraryOpaque*;
using AOTITorchError = int32_t;
using StableIValue = uint64_t;

extern "C" {
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** data);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* dim);
AOTITorchError aoti_torch_get_numel(AtenTensorHandle tensor, int64_t* numel);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** sizes);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** strides);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* dtype);
AOTITorchError aoti_torch_is_contiguous(AtenTensorHandle tensor, bool* is_contiguous);
AOTITorchError aoti_torch_library_init_fragment(const char* name, const char* file, uint32_t line,
                                                TorchLibraryHandle* library);
AOTITorchError aoti_torch_library_init_impl(const char* name, const char* key, const char* file,
                                            uint32_t line, TorchLibraryHandle* library);
AOTITorchError aoti_torch_library_def(TorchLibraryHandle library, const char* schema);
AOTITorchError torch_library_impl(TorchLibraryHandle library, const char* name,
                                  void (*function)(StableIValue*, uint64_t, uint64_t),
                                  uint64_t abi_version);
}

namespace slotzero {

constexpr uint64_t ABI_VERSION = 2ull << 56 | 11ull << 48;  // the oldest torch in pyproject.toml

enum class ScalarType : int32_t { Byte = 0, Int = 3, Long = 4, Half = 5, Float = 6 };

inline std::string text_of(const char* part) { return part; }
inline std::string text_of(const std::string& part) { return part; }
inline std::string text_of(int64_t part) { return std::to_string(part); }

template <class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void fail(const Parts&... parts) {
  throw std::runtime_error((text_of(parts) + ...));
}

inline void check_call(AOTITorchError error, const char* call) {
  if (error) fail("torch refused ", call);
}
#define CHECKED(call) slotzero::check_call(call, #call)

// Raises a RuntimeError in Python that says the rest of the arguments.
#define CHECK(condition, ...)                       \
  do {                                              \
    if (!(condition)) slotzero::fail(__VA_ARGS__); \
  } while (false)

// A tensor that an operator received. Its shape is read once.
class Tensor {
 public:
  explicit Tensor(AtenTensorHandle handle) : owned_{handle} {
    CHECKED(aoti_torch_get_data_ptr(handle, &data_));
    CHECKED(aoti_torch_get_dim(handle, &dim_));
    CHECKED(aoti_torch_get_numel(handle, &numel_));
    CHECKED(aoti_torch_get_sizes(handle, &sizes_));
    CHECKED(aoti_torch_get_strides(handle, &strides_));
    CHECKED(aoti_torch_get_dtype(handle, &dtype_));
    CHECKED(aoti_torch_is_contiguous(handle, &is_contiguous_));
  }

  void* data_ptr() const { return data_; }
  int64_t dim() const { return dim_; }
  int64_t numel() const { return numel_; }
  bool is_contiguous() const { return is_contiguous_; }
  ScalarType scalar_type() const { return static_cast<ScalarType>(dtype_); }
  int64_t size(int64_t axis) const { return sizes_[inside(axis)]; }
  int64_t stride(int64_t axis) const { return strides_[inside(axis)]; }

 private:
  int64_t inside(int64_t axis) const {
    CHECK(0 <= axis && axis < dim_, "a tensor with ", dim_, " axes was used with more");
    return axis;
  }

  struct Owned {
    AtenTensorHandle handle;
    explicit Owned(AtenTensorHandle its) : handle(its) {}
    Owned(Owned&& other) noexcept : handle(std::exchange(other.handle, nullptr)) {}
    ~Owned() {
      if (handle) aoti_torch_delete_tensor_object(handle);
    }
  };

  Owned owned_;
  void* data_ = nullptr;
  int64_t dim_ = 0, numel_ = 0, *sizes_ = nullptr, *strides_ = nullptr;
  int32_t dtype_ = 0;
  bool is_contiguous_ = false;
};

inline const char* name_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Byte: return "uint8";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Half: return "float16";
    default: return "float32";
  }
}

// Refuses a tensor that is not contiguous, of this type and of this shape.
[[maybe_unused]] static void expect(const char* kernel, const char* name, const Tensor& tensor,
                                    ScalarType dtype, std::initializer_list<int64_t> shape) {
  CHECK(tensor.scalar_type() == dtype, kernel, ": ", name, " must be ", name_of(dtype));
  CHECK(tensor.is_contiguous(), kernel, ": ", name, " must be contiguous");
  bool fits = tensor.dim() == static_cast<int64_t>(shape.size());
  int64_t axis = 0;
  for (const int64_t size : shape) fits = fits && tensor.size(axis++) == size;
  CHECK(fits, kernel, ": ", name, " has the wrong shape");
}

// Takes one argument from the words of a call.
template <class T>
struct Argument {
  static T take(StableIValue word) {
    T value;
    std::memcpy(&value, &word, sizeof value);
    return value;
  }
};

template <>
struct Argument<Tensor> {
  static Tensor take(StableIValue word) { return Tensor(Argument<AtenTensorHandle>::take(word)); }
};

template <class T>
struct Argument<std::optional<T>> {
  static std::optional<T> take(StableIValue word) {
    auto* inner = Argument<StableIValue*>::take(word);
    if (!inner) return std::nullopt;
    const StableIValue value = *inner;
    delete inner;
    return Argument<T>::take(value);
  }
};

template <auto function>
struct Boxed;

template <class Result, class... Arguments, Result (*function)(Arguments...)>
struct Boxed<function> {
  static void call(StableIValue* words, uint64_t num_arguments, uint64_t) {
    CHECK(num_arguments == sizeof...(Arguments), "a kernel's schema does not fit its function");
    unpack(words, std::index_sequence_for<Arguments...>{});
  }

 private:
  template <size_t... I>
  static void unpack(StableIValue* words, std::index_sequence<I...>) {
    if constexpr (std::is_void_v<Result>) {
      function(Argument<Arguments>::take(words[I])...);
    } else {
      const Result result = function(Argument<Arguments>::take(words[I])...);
      words[0] = 0;
      std::memcpy(words, &result, sizeof result);
    }
  }
};

// Operators of the namespace `slotzero`, from construction until the process ends.
class Operators {
 public:
  explicit Operators(const char* key) {
    CHECKED(aoti_torch_library_init_fragment("slotzero", __FILE__, __LINE__, &schemas_));
    CHECKED(aoti_torch_library_init_impl("slotzero", key, __FILE__, __LINE__, &kernels_));
  }

  template <auto function>
  const Operators& add(const std::string& schema) const {
    CHECKED(aoti_torch_library_def(schemas_, schema.c_str()));
    const std::string name = schema.substr(0, schema.find('('));
    CHECKED(torch_library_impl(kernels_, name.c_str(), &Boxed<function>::call, ABI_VERSION));
    return *this;
  }

 private:
  TorchLibraryHandle schemas_ = nullptr, kernels_ = nullptr;
};

}  // namespace slotzero
