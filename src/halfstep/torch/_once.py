"""Lists without repeats, by identity, because tensors compare number by number."""

from collections.abc import Iterable
from typing import TypeVar

Item = TypeVar("Item")


def once(items: Iterable[Item]) -> list[Item]:
    """Returns items in their order, without those that were there before.

    Example:
        >>> first, second = [1], [1]
        >>> len(once([first, second, first]))
        2
    """
    return list({id(each): each for each in items}.values())


def without(items: Iterable[Item], others: Iterable[Item]) -> list[Item]:
    """Returns items that are not among others.

    Example:
        >>> first, second = [1], [1]
        >>> without([first, second], [second]) == [first]
        True
    """
    known = set(map(id, others))
    return [each for each in items if id(each) not in known]
