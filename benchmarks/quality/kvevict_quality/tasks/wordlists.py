"""Words that the tasks are made of."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(phrase.strip() for phrase in text.split(","))


CITIES = _words(
    "Amsterdam Athens Bangkok Barcelona Beijing Berlin Boston Brussels Budapest Cairo Chicago Copenhagen Dallas Delhi "
    "Denver Dublin Edinburgh Florence Geneva Hamburg Helsinki Houston Istanbul Jakarta Kyoto Lagos Lima Lisbon London "
    "Madrid Manila Melbourne Miami Milan Montreal Moscow Mumbai Munich Nairobi Naples Oslo Ottawa Paris Prague Rome "
    "Santiago Seattle Seoul Shanghai Singapore Stockholm Sydney Tokyo Toronto Venice Vienna Warsaw Zurich"
)
FRUITS = _words(
    "apple apricot banana cherry coconut fig grape kiwi lemon lime mango melon olive orange papaya peach pear plum "
    "raspberry strawberry"
)
ANIMALS = _words(
    "badger beaver camel crow donkey eagle falcon frog goat hamster heron horse lion lizard monkey moose otter owl "
    "panda penguin pigeon rabbit raven salmon seal sheep spider tiger turtle walrus whale wolf zebra"
)
NAMES = _words(
    "Alice Bruno Clara Daniel Emma Felix Greta Henry Irene Jacob Karla Leon Martha Nathan Olga Peter Rosa Simon"
)
PLACES = _phrases(
    "the old lighthouse, the green bicycle, the wooden chest, the city museum, the railway station, the white piano, "
    "the night train, the chess club, the flower shop, the fish market, the swimming pool, the stone bridge, "
    "the music school, the post office, the steel factory, the apple orchard"
)
THINGS = _words("bicycle suitcase garage office laptop boat studio cabin piano safe")
NOUNS = _words(
    "anchor basket bottle bridge button candle carpet engine folder garden hammer island jacket kettle ladder mirror "
    "needle orchard packet ribbon"
)
