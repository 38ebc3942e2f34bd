"""Texts on which formats are compared by default: prose, instructions, code, numbers and a dialogue; and questions."""

# Prompts for a chat model, which answers them with text of its own.
QUESTIONS = (
    "What can you help me with?", "Explain what a cache does.", "Tell me a short story about a lighthouse.",
    "What is 17 plus 25?", "Rewrite in a formal tone: can't make it today, sorry!", "Name three uses of copper.",
    "Write a JSON object for a person named Ada, aged 36.", "How does bread rise?",
    "My name is Sam and I live in Lisbon. Where do I live?", "Count from 5 to 15.",
    "Give me two sentences about the sea.", "What does a compiler do?",
)  # fmt: skip

TEXT = """\
A bakery opens before the town wakes. At three in the morning the ovens are lit, and while they warm the baker weighs \
flour, water, salt and the leaven that was fed the evening before. Nothing about it is quick. The dough is mixed, left \
alone for half an hour, folded, left alone again. By the time the first customers stand in line, the bread has already \
had a long night behind it.

People often ask why the loaves taste different in winter. The answer is temperature. Yeast and bacteria in the leaven \
share the same sugar, but they do not like the same warmth: in a cool room the bacteria are slow to make vinegar and \
quick to make the milder lactic acid, so the bread turns out soft rather than sharp. A baker who knows this can steer \
the taste with a thermometer and a little patience.

How to bake a simple loaf:

1. Mix 500 grams of flour with 350 grams of water and let the mixture rest for 30 minutes.
2. Add 100 grams of active leaven and 10 grams of salt. Knead until the dough no longer sticks to the bowl.
3. Cover it and let it rise for four hours at 24 degrees. Fold it once every hour.
4. Shape the dough, put it in a basket, and keep it in the refrigerator overnight.
5. Heat the oven to 250 degrees. Bake the loaf for 20 minutes with steam, then for 25 minutes without.

The shares are easy to remember when they are written as percentages of the flour: water 70, leaven 20, salt 2. For \
three loaves, multiply everything by three: 1,500 grams of flour, 1,050 of water, 300 of leaven and 30 of salt, which \
makes 2,880 grams of dough in all.

The same arithmetic as a short program:

def recipe(loaves, flour=500):
    shares = {"flour": 1.0, "water": 0.7, "leaven": 0.2, "salt": 0.02}
    total = 0
    for name, share in shares.items():
        grams = loaves * flour * share
        print(f"{name}: {grams:.0f} g")
        total += grams
    return total

"Is it true that you never use a timer?" asked the girl behind the counter.

"Almost true," said the baker. "When I was your age I trusted the clock. Then one summer the dough was ready an hour \
early, every day, and I kept looking at my watch instead of at the dough. Now I press it with a finger. If the dent \
comes back slowly, it is time. If it comes back at once, it wants to be left alone."

"And if it does not come back at all?"

"Then we make crackers," he said, and both of them laughed.

In 1857 Louis Pasteur showed that fermentation is the work of living cells. Until then most chemists believed that it \
was a purely chemical reaction, like rust on iron. His microscope settled the question: wherever sugar turned into \
alcohol or acid, there were organisms, and where they were kept out, nothing happened. Within a few decades yeast was \
grown in factories, pressed into blocks and sold by the pound, and bread became cheaper, faster and more uniform. What \
was lost was noticed only later. The old leavens carried dozens of species, each bakery its own, and much of what we \
call the taste of bread comes from them rather than from the grain.

Today both ways live side by side. A factory bakes twenty thousand loaves an hour; a small bakery bakes two hundred a \
day. Neither will replace the other, because they do not sell the same thing. One sells bread that is always the same, \
and the other sells bread that never quite is.
"""
