"""Sentences and word lists of the arithmetic word problems; ``word_problems`` fills them in."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Step:
    """One line of a worked solution: ``result = left operator right``, and the sentence that states it."""

    result: str
    left: str
    operator: str
    right: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Template:
    """A question with number slots ``a`` to ``d``, and its solution steps.

    Steps read the slots, the results ``x``, ``y``, ``z`` of earlier steps and, in priced templates, the unit prices
    ``p`` of ``goods`` and ``q`` of ``more``. ``factors`` are the slots that are multiplied or divided by: they stay
    single digits.
    """

    question: str
    steps: tuple[Step, ...]
    letters: tuple[str, ...] = field(init=False)
    factors: frozenset[str] = field(init=False)
    priced: bool = field(init=False)

    def __post_init__(self) -> None:
        operands = [(step, side) for step in self.steps for side in (step.left, step.right)]
        used = {side for _, side in operands}
        factors = frozenset(side for step, side in operands if step.operator in "*/")
        object.__setattr__(self, "letters", tuple(letter for letter in "abcd" if letter in used))
        object.__setattr__(self, "factors", factors)
        object.__setattr__(self, "priced", "p" in used)


def _template(question: str, *steps: str) -> Template:
    """Build a template from step lines such as ``x = a * b | The boxes hold {} pens.``"""
    parsed = []
    for line in steps:
        equation, sentence = line.split(" | ")
        result, _, left, operator, right = equation.split()
        parsed.append(Step(result, left, operator, right, sentence))
    return Template(question, tuple(parsed))


GOODS = [
    "pens",
    "cups",
    "lamps",
    "books",
    "apples",
    "plums",
    "chairs",
    "hats",
    "scarves",
    "bricks",
    "candles",
    "baskets",
    "melons",
    "spoons",
    "plates",
    "ropes",
    "bells",
    "brushes",
    "kites",
    "marbles",
    "ribbons",
    "lemons",
    "stamps",
    "shells",
]
NAMES = [
    "Ada",
    "Bruno",
    "Chloe",
    "Dario",
    "Edith",
    "Felix",
    "Greta",
    "Hugo",
    "Ines",
    "Jonas",
    "Karin",
    "Leo",
    "Mira",
    "Nils",
    "Olga",
    "Pablo",
    "Rosa",
    "Sven",
    "Tara",
    "Umar",
    "Vera",
    "Wim",
    "Yara",
    "Zeno",
]
SCENES = (
    "It is a quiet and sunny morning in the village.",
    "The radio plays an old song in the next room.",
    "A grey cat sleeps near the open door all day.",
    "Outside the rain falls on the roof and the garden.",
    "The bus to the harbour is late again this week.",
    "Everyone in the street is busy before the holiday.",
    "The wind moves the leaves of the tall trees.",
    "Lunch will be ready in the kitchen very soon.",
)
LIST_OPENINGS = (
    "Here are the prices at the corner shop today:",
    "This is the price list of the market hall:",
    "The seller writes the prices on the board:",
)
TEMPLATES = (
    _template(
        "{name} fills {a} boxes with {b} {goods} each and later gives {c} {goods} to {friend}. {scene} "
        "How many {goods} does {name} still have?",
        "x = a * b | The boxes hold {} {goods}.",
        "y = x - c | That leaves {} {goods}.",
    ),
    _template(
        "On Monday {name} collects {a} {goods} and on Tuesday {b} more. Then {friend} loses {c} of them. {scene} "
        "How many {goods} are left?",
        "x = a + b | Together that is {} {goods}.",
        "y = x - c | After the loss there are {} {goods}.",
    ),
    _template(
        "{name} owns {a} {goods}. {friend} owns {b} times as many. {scene} "
        "How many {goods} do {name} and {friend} own in total?",
        "x = a * b | {friend} owns {} {goods}.",
        "y = a + x | Both own {} {goods}.",
    ),
    _template(
        "A shelf has {a} rows of {b} {goods} and another shelf has {c} {goods}. {scene} "
        "{name} counts all {goods} on both shelves. What is the count?",
        "x = a * b | The rows hold {} {goods}.",
        "y = x + c | Both shelves hold {} {goods}.",
    ),
    _template(
        "{name} has {a} {goods} and finds {b} more. {name} shares all of them equally among {c} children. {scene} "
        "How many {goods} does each child get?",
        "x = a + b | There are {} {goods} to share.",
        "y = x / c | Each child gets {} {goods}.",
    ),
    _template(
        "{name} makes {a} {goods} every day for {b} days and {friend} makes {c} every day for {d} days. {scene} "
        "How many {goods} do they make together?",
        "x = a * b | {name} makes {} {goods}.",
        "y = c * d | {friend} makes {} {goods}.",
        "z = x + y | Together they make {} {goods}.",
    ),
    _template(
        "A truck carries {a} {goods}. At the first stop {b} are taken off and at the second stop {c} are put on. "
        "{scene} How many {goods} are on the truck now?",
        "x = a - b | After the first stop there are {} {goods}.",
        "y = x + c | After the second stop there are {} {goods}.",
    ),
    _template(
        "{name} reads {a} pages on each of {b} days of a book with {c} pages. {scene} "
        "How many pages remain to be read?",
        "x = a * b | {name} reads {} pages.",
        "y = c - x | There remain {} pages.",
    ),
    _template(
        "{a} tables with {b} seats each stand in a hall and {c} guests sit down. {scene} "
        "{name} asks how many seats stay empty. How many is it?",
        "x = a * b | The hall has {} seats.",
        "y = x - c | Empty are {} seats.",
    ),
    _template(
        "{name} is {a} years old. {friend} is {b} years older. {scene} What is the sum of their ages?",
        "x = a + b | {friend} is {} years old.",
        "y = a + x | The sum is {} years.",
    ),
    _template(
        "{name} picks {a} {goods}, uses {b} of them and packs the rest in bags of {c}. {scene} "
        "How many bags does {name} fill?",
        "x = a - b | To pack there are {} {goods}.",
        "y = x / c | {name} fills {} bags.",
    ),
    _template(
        "{name} runs {a} laps in the morning and {b} laps in the evening, on each of {c} days. {scene} "
        "How many laps does {name} run?",
        "x = a + b | On one day {name} runs {} laps.",
        "y = x * c | On all days {name} runs {} laps.",
    ),
    _template(
        "In a jar are {a} red, {b} green and {c} blue {goods}. {scene} {name} tips all of them out. "
        "How many {goods} does {name} see?",
        "x = a + b | Red and green are {} {goods}.",
        "y = x + c | With the blue ones {name} sees {} {goods}.",
    ),
    _template(
        "A ride takes {a} people at a time. It runs {b} times before noon and {c} times after noon, always full. "
        "{scene} How many people ride on it?",
        "x = b + c | It runs {} times.",
        "y = a * x | It carries {} people.",
    ),
    _template(
        "{name} saves {a} dollars a week for {b} weeks and then spends {c} dollars on {goods}. {scene} "
        "How many dollars are left?",
        "x = a * b | {name} saves {} dollars.",
        "y = x - c | After buying the {goods} there are {} dollars.",
    ),
    _template(
        "A farmer plants {a} rows of {b} trees. {c} of the trees die and {d} new ones are planted. {scene} "
        "How many trees does {name} count now?",
        "x = a * b | At first there are {} trees.",
        "y = x - c | Alive are {} trees.",
        "z = y + d | Now there are {} trees.",
    ),
    _template(
        "{name} buys {a} {goods} and {b} {more} at these prices. {scene} How many dollars does {name} pay?",
        "x = a * p | As {goods} cost {p} dollars, that is {} dollars.",
        "y = b * q | As {more} cost {q} dollars, that is {} dollars.",
        "z = x + y | In all {name} pays {} dollars.",
    ),
    _template(
        "{name} has {a} dollars in the purse and buys {b} {goods} from the list. {scene} "
        "How many dollars does {name} keep?",
        "x = b * p | As {goods} cost {p} dollars, that is {} dollars.",
        "y = a - x | {name} keeps {} dollars.",
    ),
    _template(
        "{name} needs {a} {goods} and a bag for {b} dollars. {scene} How many dollars does that cost at these prices?",
        "x = a * p | As {goods} cost {p} dollars, that is {} dollars.",
        "y = x + b | With the bag that is {} dollars.",
    ),
    _template(
        "{name} buys one of the {goods} and one of the {more} for each of {a} children. {scene} "
        "How many dollars does {name} spend?",
        "x = p + q | As {goods} cost {p} dollars and {more} cost {q} dollars, a pair is {} dollars.",
        "y = x * a | For all children {name} spends {} dollars.",
    ),
    _template(
        "{friend} brings {a} {goods} back to the shop and {name} brings {b} more {goods}. {scene} "
        "How many dollars do they get back for all {goods}?",
        "x = a + b | They bring back {} {goods}.",
        "y = x * p | As {goods} cost {p} dollars, that is {} dollars.",
    ),
    _template(
        "{name} pays for {a} {goods} with a voucher worth {b} dollars and the rest in coins. {scene} "
        "How many dollars does {name} pay in coins?",
        "x = a * p | As {goods} cost {p} dollars, that is {} dollars.",
        "y = x - b | In coins that is {} dollars.",
    ),
    _template(
        "{name} orders {a} {goods} and {friend} orders {b} {more} from the same list. {scene} "
        "How many dollars more does {name} pay than {friend}?",
        "x = a * p | As {goods} cost {p} dollars, that is {} dollars.",
        "y = b * q | As {more} cost {q} dollars, that is {} dollars.",
        "z = x - y | The difference is {} dollars.",
    ),
    _template(
        "A school wants {a} {goods}. {friend} gives {b} of them for free and {name} buys the others. {scene} "
        "How many dollars does {name} pay?",
        "x = a - b | To buy there are {} {goods}.",
        "y = x * p | As {goods} cost {p} dollars, that is {} dollars.",
    ),
    _template(
        "{name} earns {a} dollars a day for {b} days and then buys a single one of the {goods}. {scene} "
        "How many dollars does {name} have after that?",
        "x = a * b | {name} earns {} dollars.",
        "y = x - p | As {goods} cost {p} dollars, there are {} dollars.",
    ),
    _template(
        "{name} sells {a} {goods} at the listed price and gives {b} dollars of that to {friend}. {scene} "
        "How many dollars does {name} keep?",
        "x = a * p | As {goods} cost {p} dollars, that is {} dollars.",
        "y = x - b | {name} keeps {} dollars.",
    ),
)
