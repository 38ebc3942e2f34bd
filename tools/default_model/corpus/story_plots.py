"""Story plots: each is a list of beats, each beat a choice of wordings.

Slots: {h} hero's name, {he} {him} {his} pronouns ({He}, {His} capitalised), {a} what the hero is ("girl", "fox"), {adj} a trait,
{f} friend's name, {fa} what the friend is, {p} place, {q} another place, {o} an object, {c} its colour, {e} a food, {w} time of day.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plot:
    """Themes to ask for, and beats from the trouble to its end. `friends`: hero and friend know each other."""

    themes: tuple[str, ...]
    beats: tuple[tuple[str, ...], ...]
    friends: bool = True


OPENINGS = (
    "Once upon a time there was {adj_a} {a} named {h}.",
    "Once upon a time, {adj_a} {a} called {h} lived near the {p}.",
    "Once there was {adj_a} {a}. {His} name was {h}.",
    "There once was {adj_a} {a} named {h} who lived by the {p}.",
    "Long ago, {adj_a} {a} named {h} had a home in the {p}.",
    "In a house near the {p} lived {adj_a} {a} named {h}.",
    "{h} was {adj_a} {a} who loved the {p}.",
    "Not far from the {p} lived {h}, {adj_a} {a}.",
    "This is the story of {h}, {adj_a} {a}.",
    "{h} the {a} lived near the {p}.",
    "In a land far away lived {adj_a} {a} by the name of {h}.",
    "Behind the {q}, where the sun goes down, lived {h}, {adj_a} {a}.",
    "Everyone at the {p} knew {h}, {adj_a} {a}.",
)
# Openings that name the friend too.
PAIRS = (
    "Once upon a time there were two friends, {h} the {a} and {f} the {fa}.",
    "{h} the {a} and {f} the {fa} were the best of friends.",
    "Near the {p} lived {h}, {adj_a} {a}, with a friend, {f} the {fa}.",
    "You never saw {h} the {a} without {f} the {fa}.",
)
SETTINGS = (
    "Every {w} {he} walked to the {p}.",
    "{He} knew every path of the {p}.",
    "What {he} liked most was {e} in the {w}.",
    "{He} kept a {c} {o} under {his} bed.",
    "People said that {h} was never in a hurry.",
    "{He} could tell the time by the sun.",
    "The air there smelled of {e} and fresh grass.",
    "In the {q} nearby {he} knew every stone.",
)
FRIENDS = (
    "{He} had a friend, {fa_a} named {f}.",
    "{His} best friend was {f}, {fa_a}.",
    "Next door lived {f}, {fa_a}, and the two were friends.",
    "Most days {he} played with {f}, {fa_a} who lived nearby.",
)
ENDINGS = (
    "From that day on, {h} and {f} were never apart.",
    "That night {h} slept well and dreamed of the {p}.",
    "And whenever {he} saw the {o}, {he} smiled.",
    "{h} never forgot that {w}.",
    "They shared some {e} and laughed until it was dark.",
    "It was the best {w} of {his} life.",
    "And so they lived happily near the {p}.",
    "When {he} came home, {he} told everyone what had happened.",
)

PLOTS = (
    Plot(("losing something", "a lost thing", "finding something again"), (
        ("One {w} {h} could not find {his} {c} {o}.", "One {w} the {c} {o} was gone.", "Then one {w} {h} lost {his} {c} {o}."),
        ("{He} looked under the bed and behind the door, but it was not there.", "{He} searched the whole house without luck.", "{He} looked everywhere and found only dust."),
        ('"Do not worry," said {f}. "We will look together."', '"I will help you," said {f}, and took {his} hand.', '{f} said, "Think. Where did you see it last?"'),
        ("They went to the {p} and looked behind every stone.", "They followed small tracks all the way to the {q}.", "They asked everyone they met on the way to the {q}."),
        ("At last they saw something {c} in the grass. It was the {o}!", "There, near the {q}, lay the {o}.", "High in a tree a crow was holding the {o}. It let go when {f} offered it some {e}."),
        ("{h} was so happy that {he} danced.", '"Thank you," said {h}, and hugged {f}.', "{h} laughed and held the {o} tight."),
    )),
    Plot(("fear of the dark", "being brave", "courage"), (
        ("{h} was afraid of the dark.", "There was one thing that {h} feared: the dark.", "At night {h} did not dare to leave the house."),
        ("One evening {f} did not come home from the {q}.", "One night a cry came from the {q}. It was {f}!", "One evening the bell rang: {f} was lost in the {q}."),
        ("{h} took a {o} and a deep breath.", "{h} shook, but {he} put on {his} coat.", "{His} heart beat fast, but {he} opened the door."),
        ("Step by step {he} walked into the night.", "{He} sang a little song and went on.", "The path was black, but the stars were there."),
        ('"I am here!" called {f} from behind a rock.', "Near the {q} {he} heard a small voice. It was {f}.", "Then {he} saw {f}, cold and tired, under a tree."),
        ('"You came in the dark!" said {f}.', '"You are the bravest {a} I know," said {f}.', "{f} could not believe who had come."),
        ("{h} saw that being brave means going on while you are afraid.", "Since then the dark was only the time before sunrise.", "After that night {h} was not afraid any more."),
    )),
    Plot(("sharing", "being generous", "a gift of food"), (
        ("One {w} {h} found a big basket of {e}.", "One {w} {h} got a whole bag of {e}.", "One {w} {h} picked all the {e} {he} could carry."),
        ("{He} wanted to keep all of it.", '"This is all mine," {he} thought.', "{He} hid it where nobody could see it."),
        ("Then {f} came by, who had eaten nothing all day.", "On the way home {he} met {f}, who was hungry.", "Soon {f} sat down next to {him} with an empty bowl."),
        ("{h} looked at the {e} and then at {f}.", "{h} thought about it for a long time.", "For a while nobody said a word."),
        ('"Here," {he} said, "take half of it."', '"Let us eat together," said {h}.', "{He} broke the food in two and gave {f} the larger part."),
        ("It tasted better than ever.", "Never before had {e} tasted so good.", "They ate, talked and watched the clouds."),
        ("{h} learned that joy grows when you share it.", "The next day {f} brought some {e} for {h}.", "Since then {he} always kept some for a friend."),
    )),
    Plot(("a storm", "bad weather", "helping in a storm"), (
        ("One {w} a great storm came over the {p}.", "One {w} dark clouds came and the rain began.", "Then came a storm such as the {p} had never seen."),
        ("The wind took the roof of {f}'s house.", "Water ran down the hill to the house of {f}.", "A tree fell across the door of {f}."),
        ("{h} heard a call for help.", "{h} saw it from the window.", '"{f} needs me," thought {h}.'),
        ("{He} took a {o} and ran through the rain.", "With a {o} on {his} back {he} went out.", "{He} held on to the fence and went step by step."),
        ("Together they carried everything to the {q}.", "{He} pulled {f} out and they ran to the {q}.", "They worked until their arms hurt."),
        ("By morning the storm was over.", "At last the rain stopped and the sun came out.", "Then it was quiet, and a rainbow stood over the {p}."),
        ('"You can stay with me," said {h}.', "All the neighbors came and built a new house.", '"I will never forget this," said {f}.'),
    )),
    Plot(("learning something new", "never giving up", "practice"), (
        ("{h} wanted to learn how to {s}.", "More than anything, {h} wished to {s}.", "{h} had a dream: to {s}."),
        ("On the first day it went wrong.", "The first try ended in the mud.", "It was much harder than it looked."),
        ("Everyone laughed, and {h} felt small.", '"You will never do it," said a proud crow.', "{He} sat down by the {p} and almost cried."),
        ('"Try again," said {f}. "I could not do it at first either."', "{f} showed {him} how to begin.", '{f} said, "A little every day is enough."'),
        ("So {h} tried every {w}, in sun and rain.", "Day after day {h} went to the {q} and tried.", "{He} fell, got up and tried once more."),
        ("And one {w}, it worked!", "Then, one {w}, {he} could do it.", "After many weeks {he} could {s} better than anyone."),
        ("Even the crow clapped.", "{f} jumped for joy.", '"I knew it," said {f}.'),
        ("{h} had learned that small steps go far.", "Now {he} helps others who are just beginning.", "And {he} was not small any more."),
    )),
    Plot(("making a friend", "friendship", "being new in town"), (
        ("{h} was new at the {p} and knew nobody.", "{h} often played alone.", "At the {p} {h} had no friends yet."),
        ("One {w} {he} saw {fa_a} named {f} sitting alone near the {q}.", "One {w} {fa_a} named {f} came by with a {c} {o}.", "One {w} {h} heard someone sing near the {q}. It was {f}, {fa_a}."),
        ("{h} wanted to say hello but was too shy.", "{h} hid behind a wall and watched.", "For a while they only looked at each other."),
        ("Then the wind blew {his} hat away, and {f} caught it.", "Then {h} held out some {e}. \"Would you like a piece?\"", "Then {f} dropped the {o}, and {h} picked it up."),
        ('"Do you want to play?" asked {f}.', '"My name is {h}," {he} said in a low voice.', '"Thank you," said {f} and smiled.'),
        ("They built a small house of sticks and leaves.", "They played until the sun went down.", "They found out that both of them loved {e}."),
        ("The next day they met again, and the day after that.", "Soon you never saw one without the other.", "A friend had been so close all the time."),
    ), friends=False),
    Plot(("telling the truth", "honesty", "a broken thing"), (
        ("One {w} {h} broke the {c} {o} of {f}.", "While playing, {h} dropped the {c} {o} that belonged to {f}.", "One {w} there was a loud crash. The {o} of {f} lay in pieces."),
        ("Nobody had seen it.", "{He} looked around. Nobody was there.", "{He} pushed the pieces under a bush."),
        ("All {w} {he} could not eat or sleep.", "But {his} heart felt heavy.", "Even {e} did not taste good now."),
        ('"Have you seen my {o}?" asked {f}.', "Then {f} came and looked for the {o}.", "The next day {f} searched the whole {p}."),
        ('"I broke it," said {h}. "I am sorry."', "{h} took a deep breath and told the truth.", "{h} showed {f} the pieces and cried."),
        ("{f} was quiet for a moment and then nodded.", '"Thank you for telling me," said {f}.', '"I was sad," said {f}, "but now I am not angry."'),
        ("Together they glued the {o}, and it looked almost new.", "They made a new {o} from wood, and it was even better.", "They mended it at the {q}."),
        ("{h} felt light again.", "Since then {h} has always told the truth.", "The truth had been hard, but it was short."),
    )),
    Plot(("a treasure", "a secret map", "an adventure"), (
        ("One {w} {h} found an old map in a {o}.", "One {w} a map fell out of an old book.", "Under the floor {h} found a {c} map."),
        ("It showed a way from the {p} to the {q}.", "A red cross marked a place near the {q}.", '"Follow the water," it said in small letters.'),
        ("{h} ran to {f}. \"We must go!\"", "{h} showed it to {f}, and both packed some {e}.", "{f} took a rope and a lamp, and they left."),
        ("They crossed the river on a fallen tree.", "They climbed over rocks and under branches.", "The way was long and their feet hurt."),
        ("At a cave an old owl asked them a riddle, and {f} knew the answer.", "Twice they got lost and twice {h} found the way.", "A deep hole lay in the path, but they helped each other over it."),
        ("At last they dug where the cross was.", "There it was: a box with a {c} lock.", "Behind a stone they found a small chest."),
        ("Inside was no gold but a note: the treasure is the way you went together.", "It was full of seeds, and they planted them around the {p}.", "It held a {o} that shone like the sun."),
        ('"Best treasure ever," said {f}.', "They laughed all the way home.", "They still have the map on the wall."),
    )),
    Plot(("helping a stranger", "kindness", "a sick animal"), (
        ("One {w} {h} heard a weak voice near the {q}.", "One {w} {h} saw somebody lying beside the path.", "On the way to the {q} {h} met someone who could not walk."),
        ("It was {fa_a} named {f} who had a hurt leg.", "It was {f}, {fa_a}, who had fallen and was shaking with cold.", '"Please help me," said the stranger, {fa_a} named {f}.'),
        ("Others had passed by without stopping.", "{h} was late, but {he} stopped.", "{h} did not think twice."),
        ("{He} brought water and some {e}.", "{He} put {his} coat around {f}.", "{He} carried {f} home on {his} back."),
        ("For three days {he} took care of {f}.", "{h} read stories to {f} every {w}.", "{He} made a warm bed near the fire."),
        ("Slowly {f} got better.", "Then one morning {f} could stand again.", "On the fourth day {f} smiled."),
        ("Before leaving, {f} gave {him} a {c} {o}.", '"I will find a way to thank you," said {f}.', "Years later, when {h} needed help, {f} was there."),
        ("A kind act always comes back.", "{h} had not lost time. {He} had found a friend.", "It was a small thing to do, and a big thing to get."),
    ), friends=False),
    Plot(("a race", "a contest", "winning and losing"), (
        ("Every year there was a race from the {p} to the {q}.", "One {w} a big race was held at the {p}.", "The {p} was full of people: it was the day of the race."),
        ("{h} wanted to win more than anything.", "{h} had trained for weeks.", "Everyone thought that {h} would win."),
        ("The bell rang and they all ran.", "Three, two, one, and off they went!", "At the start {h} was far ahead."),
        ("Halfway, {h} saw that {f} had fallen.", "Near the {q}, {f} tripped over a root.", "Then {h} heard a cry. {f} was stuck in the mud."),
        ("The finish was so close.", "The others ran past without looking.", "{h} looked ahead and then back."),
        ("{He} turned around and helped {f} up.", '"Take my hand," said {h}.', "{He} stopped and pulled {f} out."),
        ("They crossed the line together, last of all.", "Hand in hand they walked to the finish.", "They came in last, but the crowd cheered the loudest."),
        ("The prize was a {c} {o}, and the winner gave it to {h}.", '"You won something better," said an old man.', "{h} did not mind at all."),
    )),
    Plot(("planting a seed", "patience", "a garden"), (
        ("One {w} {h} planted a tiny seed beside the {p}.", "An old woman gave {h} a seed.", "In {his} pocket {h} found a seed."),
        ("{He} watered it every {w}.", "{He} put a {o} next to it so that nobody would step on it.", '"Grow fast," {he} told it.'),
        ("A week went by and nothing happened.", "Days passed. There was only earth.", "{h} looked every hour and saw nothing."),
        ('"It is dead," said {h} sadly.', "{h} wanted to dig it up.", "{He} was about to give up."),
        ('"Wait," said {f}. "Good things need time."', "{f} sat down beside {him} and waited too.", '{f} laughed. "It works while you sleep."'),
        ("Then, after rain, there was a small green leaf.", "One morning a thin green line came out of the ground.", "In spring it broke through at last."),
        ("It grew taller than {h} and carried {e}.", "By summer it was a small tree, and birds sang in it.", "Soon it had {c} flowers that everyone came to see."),
        ("{h} had learned to wait.", '"You were right," {he} said to {f}.', "Every year they sit under it together."),
    )),
    Plot(("a wish", "magic", "a magic thing"), (
        ("One {w} {h} found a {c} {o} that could talk.", "One {w} an old {o} at the {p} began to glow.", "In the {q} {h} met a tiny old man with a {c} {o}."),
        ('"You have one wish," it said.', '"Because you are kind, you may wish for one thing," said a voice.', '"Wish for what you like," it whispered.'),
        ("{h} thought of gold, of toys and of {e}.", "First {h} thought of a castle.", "A hundred wishes went through {his} head."),
        ("Then {he} thought of {f}, who had been ill for weeks.", "Then {he} saw {f}, who was sad.", "But then {he} remembered {f}, who had no home."),
        ('"I wish that {f} is well," {he} said.', '"Please make {f} happy," said {h}.', '"Help {f}," {he} said without waiting.'),
        ("There was a flash, and then it was quiet.", "The {o} shone once and went dark.", "A warm wind went through the {p}."),
        ("{f} came running and laughed.", "The next morning {f} stood at the door with {e} in both hands.", "And it came true."),
        ("{h} had given {his} wish away and lost nothing.", "No gold could be worth more.", "The {o} never spoke again, but {h} kept it."),
    )),
    Plot(("a mistake", "working together", "a plan"), (
        ("The {p} needed a new bridge.", "One {w} the old bridge to the {q} broke.", "Nobody could get to the {q} any more: the bridge was gone."),
        ("{h} wanted to build it alone.", '"I can do it by myself," said {h}.', "{h} did not want any help."),
        ("{He} worked all {w} and it fell down.", "The first bridge broke when a bird sat on it.", "It looked fine until the water came."),
        ("{h} was angry and kicked a stone.", "{h} sat on the bank and felt silly.", '"It is no use," {he} said.'),
        ('"What if we all carry something?" asked {f}.', "{f} brought a {o} and a good idea.", '"You are strong and I can draw," said {f}. "Let us try together."'),
        ("So one held, one tied and one counted.", "They brought ropes, wood and {e} for everyone.", "From the whole {p} they came to help."),
        ("In three days the bridge stood.", "By evening they could walk across.", "The new bridge did not move, even in the wind."),
        ("{h} walked over it first, with {f} beside {him}.", "They named it the bridge of friends.", '"We did it," said {h}, and meant every one of them.'),
    )),
    Plot(("going home", "a long way home", "homesickness"), (
        ("One {w} {h} walked too far and could not find the way back.", "{h} followed a {c} bird until nothing looked familiar.", "In the fog {h} lost the path."),
        ("All around was the {q}, and it was silent.", "The trees looked the same on every side.", "It was getting cold, and {he} missed home."),
        ("{He} sat down and ate the last of the {e}.", "{He} wanted to cry but did not.", "{He} held on to {his} {o}."),
        ("Then {f} appeared, {fa_a} with a kind face.", "Someone coughed. It was {f}, {fa_a}.", '"Are you lost?" asked {f}, {fa_a}.'),
        ('"Listen," said {f}. "Where does the water run?"', '"Look at the stars," said {f}. "That one points to the {p}."', "{f} knew a short way through the hills."),
        ("They followed the stream down.", "They walked side by side and told each other stories.", "It was a long way, but not a lonely one."),
        ("At last {he} saw the lights of the {p}.", "Then {h} smelled {e} and knew that home was near.", "Behind the last hill lay the {p}."),
        ("{h} ran to the door and turned to say thanks.", '"Come in," said {h}, "and stay for dinner."', "Everybody was waiting there with open arms."),
    ), friends=False),
    Plot(("a birthday", "a surprise party", "a forgotten birthday"), (
        ("It was {h}'s birthday, and nobody said a word.", "On {his} birthday {h} woke up, and the house was quiet."),
        ('"They have forgotten me," {he} thought.', "{He} waited all {w}, but no one came.", "Even {f} walked by without a smile."),
        ("Sadly {he} went to the {q}.", "So {h} went for a walk to the {q} alone."),
        ('There everybody jumped up. "Surprise!" they called.', "Behind the trees were lights, {e} and all {his} friends.", "There stood {f} with a {c} {o} and a big smile."),
        ("{h} laughed until {he} cried.", "It was the best birthday of all.", '"I would never forget you," said {f}.'),
    )),
    Plot(("the moon", "the night sky", "the stars"), (
        ("{h} wanted to touch the moon.", "Every night {h} looked up at the moon.", '"I want to have the moon," said {h}.'),
        ("{He} climbed the highest tree near the {p}, but the moon was still far away.", "{He} built a tower of boxes, and it fell down.", "{He} jumped as high as {he} could, again and again."),
        ('"Come with me," said {f}, and led {him} to the {q}.', "{f} laughed and brought a bowl of water.", '{f} said, "I know a better way."'),
        ("There was the moon, round and bright, in the water.", "And in the water lay the moon, so near that {h} could touch it."),
        ("{h} put one finger in, and the moon danced.", '"It is ours," whispered {h}.', "They sat beside it all night."),
    )),
    Plot(("a noise at night", "a ghost in the house", "something scary"), (
        ("At night {h} heard a strange noise.", "Knock, knock, it went in the middle of the night.", "There was something in the dark: tap, tap, tap."),
        ('"It is a ghost!" whispered {f}.', "{h} pulled the blanket over {his} head.", "{f} shook like a leaf."),
        ("But {h} took a light and went to look.", "Together they went down, step by step."),
        ("It was only a {o} in the wind.", "It was only a little mouse with a piece of bread.", "It was the rain on an old {o}."),
        ("They laughed so loudly that everybody woke up.", '"Good night, ghost," said {h}.', "After that they slept until noon."),
    )),
    Plot(("the rain", "a rainy day", "being bored"), (
        ("It rained and rained, and {h} was bored.", "One rainy {w} {h} did not know what to do."),
        ('"There is nothing to do," said {h}.', "{He} looked out of the window and sighed."),
        ("Then {f} came with a {c} {o}.", "Then {f} knocked, wet from head to foot.", '"Come outside!" called {f}.'),
        ("They jumped into every puddle on the way to the {p}.", "They built a boat of paper and let it sail down the street.", "They caught the rain in cups and made soup of leaves."),
        ("When the sun came out, they were almost sad.", "In the evening they drank hot milk, and it was the best day of the week.", '"I hope it rains tomorrow," said {h}.'),
    )),
    Plot(("the biggest cake", "baking", "cooking together"), (
        ("{h} wanted to bake the biggest cake of the {p}.", "One {w} {h} said, \"Today I will bake a cake.\""),
        ("{He} put in {e}, then more {e}, and a little salt.", "{He} mixed everything in a big {o}.", "{f} read the recipe, and {h} did not listen."),
        ("The cake grew and grew until it filled the kitchen.", "The cake was so hard that nobody could cut it.", "It smelled like old shoes."),
        ('"What now?" asked {f}.', "{h} looked at it and began to laugh."),
        ("So they invited everyone, and not a piece was left.", "They gave it to the ducks, and even the ducks laughed.", "They used it as a chair for many years."),
    )),
    Plot(("a letter", "a message", "waiting for somebody"), (
        ("Every {w} {h} waited for a letter.", "{h} had never got a letter."),
        ("But the box was always empty.", '"Nothing today," said the mailman, as always.'),
        ("{f} saw it and had an idea.", '"I can do something about that," thought {f}.'),
        ("The next day there was a {c} letter in the box.", "Next {w} the box was full."),
        ('It said: "Dear {h}, I am glad that you are here."', 'In it were only four words: "You are my friend."'),
        ("{h} read it a hundred times.", "{h} wrote back at once, and they still write each other today."),
    )),
    Plot(("the sea", "a boat", "sailing"), (
        ("{h} had a little boat named {c} star.", "{h} built a boat from an old {o}."),
        ("One {w} {he} sailed out with {f}.", '"Let us see where the water ends," {he} said to {f}.'),
        ("The waves were as high as houses.", "Soon they could not see the land any more.", "The wind took their map."),
        ("A whale looked at them and said, \"Follow me.\"", "{f} knew the stars, and they followed one of them.", "They sang so that they were not afraid."),
        ("In the morning they were home, wet and happy.", "They found an island with {e} for everyone and stayed a week.", "Since then {h} waves at every whale."),
    )),
    Plot(("snow", "winter", "a snowman"), (
        ("In the first snow {h} built a snowman.", "One winter {w} {h} and {f} built a snowman."),
        ("They gave him a {c} hat and a {o}.", "He had a carrot for a nose and a kind smile."),
        ('"Who are you?" the snowman asked suddenly.', "At night the snowman began to walk.", '"It is cold out here," said the snowman. "I like it."'),
        ("He told them stories of the north.", "They danced around the {p} until morning."),
        ("When spring came, he was gone, and a flower stood in his place.", '"See you next winter," he said when the sun came back.', "Only his hat was left, and {h} keeps it until he comes back."),
    )),
    Plot(("music", "a song", "singing"), (
        ("{h} loved to sing, but {his} voice was like an old door.", "When {h} sang, the birds flew away."),
        ('"Please stop," said everyone at the {p}.', "So {he} only sang when nobody could hear."),
        ("One {w} {f} got lost in the fog.", "Then came a fog, and {f} could not find the way."),
        ("{h} sang as loudly as {he} could.", "{h} stood on a hill and sang."),
        ("{f} heard it from far away and followed the song home.", '"I would know that voice anywhere," said {f}.'),
        ("Since then nobody says a word when {h} sings.", "From then on they all sang with {him}."),
    )),
    Plot(("a shadow", "being alone", "loneliness"), (
        ("{h} was alone so often that {he} talked to {his} shadow.", "{h} had only one friend: {his} shadow."),
        ("They walked to the {p} together every {w}.", "The shadow did everything that {h} did."),
        ("But on a dark day the shadow was gone.", "Then clouds came, and the shadow was away for a week."),
        ('"Are you looking for something?" asked {fa_a} named {f}.', "Someone else was looking for a shadow: {f}, {fa_a}."),
        ("They searched together and forgot what they were looking for.", "They talked until it was dark."),
        ("When the sun came back, there were two shadows side by side.", "Now there are four of them: {h}, {f} and two shadows."),
    ), friends=False),
    Plot(("a lie", "showing off", "pride"), (
        ('"I once fought a dragon," said {h}.', "{h} told everyone that {he} could fly.", '"I have a house of gold," said {h}.'),
        ("Everybody at the {p} was amazed.", '"Really?" asked {f}. "Then show us!"'),
        ("{h} turned red.", "{h} looked at the ground and did not know what to say."),
        ('"It is not true," {he} said at last.', "So {he} had to tell the truth."),
        ('"I like you better without dragons," said {f}.', '{f} laughed. "You tell very good stories. Write them down!"'),
        ("And that is what {h} did.", "Today {h} writes books, and everyone loves them."),
    )),
    Plot(("a robot", "a machine", "technology"), (
        ("{h} built a machine out of a {o} and an old clock.", "One {w} {h} found a robot in the {q}."),
        ("It could do only one thing: count.", "It asked the same question all day: \"How can I help?\"", "It was slow, and it made funny noises."),
        ('"It is useless," said the others.', '"Throw it away," said a crow.'),
        ("But when {f} was lost in the dark, its little light showed the way.", "But at night, when {f} could not sleep, it counted sheep for {f}."),
        ("Now nobody laughs about it any more.", '"Small things can be just right," said {h}.', "{h} gave it a name and a {c} hat."),
    )),
    Plot(("bedtime", "falling asleep", "a sleepless night"), (
        ("{h} could not sleep.", "It was late, but {h} was still awake."),
        ("{He} counted the stars and lost count.", "{He} turned to the left, and {he} turned to the right."),
        ("So {he} went to see {f}, who was awake too.", '"Are you asleep?" {he} asked {f}. "Yes," said {f}.'),
        ("They listened to the wind in the {p}.", "They told each other very boring stories."),
        ("Soon both of them slept, and so did the {p}.", "And before the story was over, {h} was asleep."),
    )),
    Plot(("a dream", "flying", "a strange dream"), (
        ("One night {h} dreamed that {he} could fly.", "In a dream {h} grew wings."),
        ("{He} flew over the {p} and over the {q}.", "Far below {he} saw the {p}, as small as a {o}."),
        ("Up there {he} met {f}, who could fly too.", '"What are you doing in my dream?" asked {f}.'),
        ("They raced with the birds and sat down on a cloud.", "The clouds tasted of {e}."),
        ("In the morning {h} found a {c} feather on {his} bed.", '"I had the strangest dream," said {f} the next day. {h} only smiled.'),
    )),
    Plot(("a small hero", "being small", "courage of the small"), (
        ("{h} was the smallest of all.", "Everyone at the {p} was bigger than {h}."),
        ('"You are too small for this," they always said.', "Nobody asked {him} when there was something to do."),
        ("One {w} {f} fell into a deep hole.", "Then {f} got stuck under a heavy {o}."),
        ("The others were too big to get in.", "Everyone pulled, but nothing moved."),
        ("{h} was just small enough and brought {f} a rope.", "Only {h} could crawl in and set {f} free."),
        ('"Small is a good size," said {f}.', "Nobody has called {him} too small since."),
    )),
)  # fmt: skip
SKILLS = (
    "swim", "dance", "whistle", "juggle", "play the flute", "ride a bike", "climb trees", "skate", "bake bread", "play the drum",
    "fly a kite", "sail a boat", "draw", "sing", "read",
)  # fmt: skip
