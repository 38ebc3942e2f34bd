"""Tree of thought over a document: branches write thoughts, the model rates them, the best ones go on.

    python examples/tree_of_thought.py [MODEL]

Every branch prints how many tokens of its prompts came from the prefix cache: the document is computed once.
"""

from __future__ import annotations

import sys

from quire import LLM, ProgramState, assistant, function, gen, select, user

DOCUMENT = """\
Mara keeps a small bakery in the harbour street. On Monday she sold 42 loaves of bread and 17 cakes. On Tuesday the
ferry did not sail, so few guests came, and she sold 19 loaves and 6 cakes. Her brother Tom repairs the oven, which is
30 years old and burns the bread on its left side. A new oven costs 4,800 euros. The bank lends money at 6 percent, but
Mara does not like debts. Her neighbour Ines sells fish, owns a free cold room and would like to sell bread beside it.
In summer the street is full of guests from May to September; in winter only the people of the town buy bread. Mara
bakes from three to eleven in the morning and sleeps in the afternoon. She has saved 2,100 euros in four years. Tom
wants to move to the city in spring, and then nobody is left who knows the old oven."""
QUESTION = "What should Mara do first?"


@function(seed=7, temperature=0.6)
def tree_of_thought(
    s: ProgramState, document: str, question: str, depth: int = 2, width: int = 4, keep: int = 2
) -> list[ProgramState]:
    """The branches that were best at the end; every level keeps `keep` of all branches."""
    s += user("Read this text: " + document)
    s += assistant("I have read it.")
    best = [s]
    for level in range(depth):
        branches = [branch for state in best for branch in state.fork(width)]
        for branch in branches:
            branch += user(f"{question} Write thought {level + 1} in one sentence.")
            branch += assistant(gen("thought", max_tokens=32, stop="\n"))
        judges = [branch.fork(1)[0] for branch in branches]
        for judge in judges:
            judge += user("Does this thought help to answer the question? Say yes or no.")
            judge += assistant(select("helps", choices=["yes", "no"]))
        choices = [judge.result("helps").scores for judge in judges]
        scores = {
            branch: yes_no["yes"] - yes_no["no"] for branch, yes_no in zip(branches, choices, strict=True)
        }
        for branch in branches:
            path = ".".join(map(str, branch.path))
            print(
                f"{path:8} {branch.usage.cached_tokens:4} of {branch.usage.prompt_tokens:4} prompt tokens cached, "
                f"log odds {scores[branch]:5.2f}: {branch['thought'][:50]!r}"
            )
        best = sorted(branches, key=scores.__getitem__, reverse=True)[:keep]
    for state in best:
        state += user(f"{question} Answer in one sentence.")
        state += assistant(gen("answer", max_tokens=48, stop="\n", temperature=0))
    return best


def main() -> None:
    with LLM(*sys.argv[1:2]) as llm:
        state = tree_of_thought.run(llm, DOCUMENT, QUESTION)
        for branch in state.returned:
            print("answer:", branch["answer"])
        records = llm.step_records()
        print(
            f"{sum(record.prefill_tokens for record in records)} prompt tokens computed in {len(records)} steps"
        )


if __name__ == "__main__":
    main()
