"""[4] Admission: whether one more rollout can be let in, by arithmetic alone."""

from dataclasses import dataclass

from forge.actors.buffer.terms import Terms


@dataclass(frozen=True, slots=True)
class Load:
    """What a buffer has promised, in episodes."""

    generating: int  # the version
    next_version: int  # of the trainer at its next step
    bound: int  # versions that what is let in now may age
    num_promised: int  # to be trained on at least once: under way, or never handed out
    num_uses: int  # times that these, and those handed out before, may be handed out
    num_available: int  # episodes under way or waiting


def has_room(num_episodes: int, load: Load, terms: Terms) -> bool:
    """Whether a rollout of so many would be trained on in time, whatever the others do.

    The steps from the next one to the last at which what begins now is young enough, that is at version
    generating + bound, or to the last of the run, take so many episodes; what is promised must fit into them
    (see `slack`; AReaL, arXiv 2505.24298, eq. 3, counts the same from the first step on). So nothing is
    generated to be thrown away.

    With `reuse` the steps are to be filled by all the uses of each episode, so less is generated; but not
    less than the next step needs, once no newer version comes before it. Where groups don't fill a step
    evenly, one more is let in if the next step would lack it then; the part left over may get too old.
    """
    end = load.generating + load.bound + 1
    if terms.num_steps is not None:
        end = min(end, terms.num_steps)
    num_slots = (end - load.next_version) * terms.num_per_step
    is_newest = load.generating >= load.next_version - load.next_version % terms.sync_interval
    if load.num_promised + num_episodes > num_slots:
        return is_newest and load.num_promised < min(num_slots, terms.num_per_step)
    num_uses = load.num_uses + num_episodes * terms.reuse
    return num_uses <= num_slots or (is_newest and load.num_available < terms.num_per_step)
