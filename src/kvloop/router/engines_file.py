"""The file that names engines (`--config`):

    engines:
      - url: http://10.0.0.1:8100
        role: prefill          # prefill, decode or both
        ranks: 2               # data-parallel ranks: so many, or a list of them
        weight: 2.0            # can take twice what others can
        labels: {zone: a}

`url` and `role` have to be there. Anything else is an error, which names the file, the line and the key.
"""

from kvloop.errors import UserError
from kvloop.router.strict import Section, read_strictly
from kvloop.router.target import MAX_RANKS, MAX_TARGETS, Role, Target, check_url


def read_engines(path: str, data: bytes) -> list[Target]:
    """The targets that a file's content names. UserError for what cannot be."""
    file = read_strictly(path, data)
    file.only("engines")
    targets: list[Target] = []
    names: set[str] = set()
    for section in file.sections("engines"):
        for target in _targets(section):
            if target.name in names:
                section.refuse("url", f"is there twice: {target.name}")
            names.add(target.name)
            targets.append(target)
        if len(targets) > MAX_TARGETS:
            raise UserError(f"{path} names more than {MAX_TARGETS} engines")
    return targets


def _targets(section: Section) -> list[Target]:
    section.only("url", "role", "ranks", "weight", "labels")
    url = section.needed("url").rstrip("/")
    try:
        check_url(url)
    except UserError as error:
        section.refuse("url", f"is none: {error}")
    said = section.needed("role")
    if said not in [*Role]:
        section.refuse("role", f"must be one of {', '.join(Role)}, not {said!r}")
    weight = section.positive("weight", 1.0)
    labels = section.texts("labels")
    ranks = section.whole_or_list("ranks")
    listed = range(min(ranks, MAX_RANKS + 1)) if isinstance(ranks, int) else ranks
    if listed is None:
        return [Target(url, Role(said), None, weight, labels)]
    if not 0 < len(listed) <= MAX_RANKS or len(set(listed)) < len(listed) or max(listed) >= MAX_RANKS:
        section.refuse("ranks", f"must be 1 to {MAX_RANKS}, or different ones of them")
    return [Target(url, Role(said), rank, weight, labels) for rank in listed]
