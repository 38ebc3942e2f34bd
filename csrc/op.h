// One op of a program: a struct of its own in a file of its own in ops/, found by the name of its kind.
//
// An op reads its fields once, when it is made (see fields.h), and refuses what it cannot compute. In a step every thread
// claims tasks of the op and runs them; between two ops the threads meet.
#pragma once

#include <algorithm>
#include <memory>

#include "context.h"
#include "fields.h"

namespace quire {

class Op {
 public:
  explicit Op(Context& context) : context_(context) {}
  virtual ~Op() = default;
  Op(const Op&) = delete;
  Op& operator=(const Op&) = delete;

  // Tasks of the step that the context describes. Nothing runs meanwhile.
  virtual int tasks() const = 0;
  virtual void run(int task, int thread) = 0;

  // Whether the op reads its weights as one long stream, and where a thread's part of it begins in this step, or null:
  // the op that streams before it prefetches from there at its end.
  virtual bool streams() const { return false; }
  virtual const char* first_weights(int /*thread*/) const { return nullptr; }
  const Op* next_stream = nullptr;

 protected:
  const Kernels& kernels() const { return context_.kernels; }

  Context& context_;
};

// An op whose tasks are some rows of `out`.
class RowOp : public Op {
 public:
  RowOp(Context& context, const Buffer& out) : Op(context), out_(out) {}

  int tasks() const override {
    const int rows = context_.rows_of(out_);
    return ceil_div(rows, context_.rows_of_task(rows));
  }
  void run(int task, int thread) override {
    const int rows = context_.rows_of(out_), height = context_.rows_of_task(rows);
    run_rows(task * height, std::min(rows, (task + 1) * height), thread);
  }

 protected:
  virtual void run_rows(int begin, int end, int thread) = 0;
  bool rounds() const { return out_.dtype == DType::i8; }

  const Buffer& out_;
};

// An op whose tasks are some columns of a row of `out`; rows that are rounded are done whole.
class ColumnOp : public RowOp {
 public:
  using RowOp::RowOp;

  int tasks() const override { return rounds() ? RowOp::tasks() : context_.rows_of(out_) * chunks(); }
  void run(int task, int thread) override {
    if (rounds()) return RowOp::run(task, thread);
    const int begin = task % chunks() * kColumns;
    run_columns(task / chunks(), begin, std::min(out_.cols, begin + kColumns));
  }

 protected:
  static constexpr int kColumns = 1024;  // of a task
  static_assert(kColumns % kMaximaCols == 0);

  virtual void run_columns(int row, int begin, int end) = 0;
  void run_rows(int /*begin*/, int /*end*/, int /*thread*/) override {}

 private:
  int chunks() const { return ceil_div(out_.cols, kColumns); }
};

// An op of the kind that Python's class of that name describes. Throws std::invalid_argument for an unknown kind, and for
// fields that are missing, unknown or do not fit together.
std::unique_ptr<Op> make_op(const std::string& kind, const FieldMap& fields, Context& context);

using OpMaker = std::unique_ptr<Op> (*)(Fields& fields, Context& context);
bool register_op(const char* kind, OpMaker maker);

// In the op's own file: makes it known under the name of its Python class.
#define QUIRE_OP(Kind)                                                                       \
  [[maybe_unused]] static const bool registered = ::quire::register_op(                      \
      #Kind, [](::quire::Fields& fields, ::quire::Context& context) -> std::unique_ptr<Op> { \
        return std::make_unique<Kind>(fields, context);                                      \
      });

}  // namespace quire
