#include "adapter_reader.h"
#include "beside.h"
#include "multiply.h"
#include "shrinking.h"

namespace quire {
namespace {

// A task is sixteen ranks of one part for some rows of one adapter.
struct Shrink final : Op, Beside, AdapterReader {
  Shrink(Fields& f, Context& c) : Op(c), each(f, c, 0), apart(f.flag("apart")) {
    f.require(each.x.cols == each.adapted.cols * (apart ? each.parts : 1), "x must be of the adapted linear's width");
    f.require(each.x.logits == each.out.logits && each.x.per == 1 && each.out.per == 1,
              "x and out must have the same rows, one each");
  }

  int tasks() const override {
    return static_cast<int>(context_.adapters.rows(each.out.logits).pieces.size()) * each.columns();
  }

  void run(int task, int /*thread*/) override {
    const AdapterRows& rows = context_.adapters.rows(each.out.logits);
    const AdapterGroup& piece = rows.pieces[task / each.columns()];
    const int column = task % each.columns(), first = apart ? column / each.vectors * each.adapted.cols : 0;
    const int32_t* tokens = rows.order.data() + piece.begin;
    each.run(column, piece.slot, 0, first, tokens, tokens, piece.end - piece.begin);
  }

  const Buffer& input() const override { return each.x; }

  void list(int part, int parts, Ahead* ahead) const override {
    const std::vector<AdapterGroup>& groups = context_.adapters.rows(each.out.logits).groups;
    const int all = static_cast<int>(groups.size()) * each.columns();
    for (int i = even_cut(all, part, parts); i < even_cut(all, part + 1, parts); ++i)
      each.list(i % each.columns(), groups[i / each.columns()].slot, 0, ahead);
  }

  Shrinking each;
  bool apart;  // each part has columns of x of its own
};

QUIRE_OP(Shrink)

}  // namespace
}  // namespace quire
