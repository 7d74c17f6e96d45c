"""[4] Choice: which of the groups that wait make a batch."""

from collections.abc import Callable, Iterable

from forge.actors.buffer.groups import Group
from forge.actors.buffer.slack import Slack
from forge.actors.buffer.terms import Strategy

Waiting = tuple[int, Group]
"""A group, and the order in which it came."""

ORDERS: dict[Strategy, Callable[[Waiting], tuple]] = {
    "oldest": lambda w: (w[1].version, w[1].place, w[0]),
    "newest": lambda w: (-w[1].version, -w[1].place, w[0]),
    "prioritized": lambda w: (-w[1].priority, w[1].version, w[1].place, w[0]),
}
"""Who is preferred, the first most.

oldest: the oldest policy, among equals the first let in; so batches are nearly in the order of the questions.
newest: what is nearest to the policy being trained.
prioritized: the greatest mean absolute advantage of the group, from which most is to be learned.
Prioritized experience replay (Schaul et al. 2016, arXiv 1511.05952) draws transitions by their TD errors,
and weights the loss against the bias of that. Here groups are taken in order, not drawn: a repeated run and
the process after a kill choose alike; and no weights are needed, as the order decides *when* a promised
episode is trained on, never whether. Only what is handed out again (`reuse`) leans to great advantages.
"""


def choose(
    waiting: Iterable[Waiting], strategy: Strategy, slack: Slack, due_of: Callable[[Group], int | None]
) -> list[tuple[int, Group, int]]:
    """As many episodes as the batch wants: (order of coming, group, how many of its episodes).

    Each group at most once, and whole, as long as any fits; a batch that can't be filled so is filled with
    parts of the preferred ones. `slack` must be one that can be filled.
    """
    chosen: list[tuple[int, Group, int]] = []
    left_out: list[Waiting] = []
    for serial, group in sorted(waiting, key=ORDERS[strategy]):
        if not slack.num_left:
            break
        size, due = len(group.episodes), due_of(group)
        if size <= min(slack.num_left, slack.fits(due)):
            slack.take(size, due)
            chosen.append((serial, group, size))
        else:
            left_out.append((serial, group))
    for serial, group in left_out:
        due = due_of(group)
        if size := min(len(group.episodes), slack.num_left, slack.fits(due)):
            slack.take(size, due)
            chosen.append((serial, group, size))
    assert not slack.num_left, f"{slack.num_left} episodes are missing in a batch"
    return chosen
