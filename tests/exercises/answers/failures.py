"""Answers to ``check.failures``."""

import math

from graded import Answers

from workbook import check

# interval(checkpoint_s, gpu_s, num_gpus)


def interval(checkpoint_s, gpu_s, num_gpus):
    return math.sqrt(2 * checkpoint_s * gpu_s / num_gpus)


def least_of_many(checkpoint_s, gpu_s, num_gpus):
    """Where both losses are equal, by bisection."""
    low_s, high_s = 1e-6, 1e12
    for _ in range(200):
        middle_s = math.sqrt(low_s * high_s)
        if checkpoint_s / middle_s > middle_s * num_gpus / (2 * gpu_s):
            low_s = middle_s
        else:
            high_s = middle_s
    return low_s


def without_the_factor(checkpoint_s, gpu_s, num_gpus):
    return interval(checkpoint_s / 2, gpu_s, num_gpus)


def of_one_gpu(checkpoint_s, gpu_s, num_gpus):
    return interval(checkpoint_s, gpu_s, 1)


# quorum(answers, last, now_s, patience_s, min_replicas)


def quorum(answers, last, now_s, patience_s, min_replicas):
    healthy = {
        replica for replica, (heard_s, _) in answers.items() if now_s - heard_s <= patience_s
    }
    if last and 2 * len(healthy & set(last)) <= len(last):
        return [], []
    if not healthy or len(healthy) < min_replicas:
        return [], []
    newest = max(answers[replica][1] for replica in healthy)
    leading = {replica for replica in healthy if answers[replica][1] == newest}
    return tuple(sorted(leading)), tuple(sorted(healthy - leading))


def by_votes(answers, last, now_s, patience_s, min_replicas):
    groups, votes = {}, 0
    for replica in sorted(answers):
        heard_s, step = answers[replica]
        if heard_s < now_s - patience_s:
            continue
        groups.setdefault(step, []).append(replica)
        votes += last.count(replica)
    count = sum(map(len, groups.values()))
    if count < max(1, min_replicas) or (last and votes <= len(last) // 2):
        return [[], []]
    leading = groups.pop(max(groups))
    return [leading, sorted(replica for group in groups.values() for replica in group)]


def half_is_enough(answers, last, now_s, patience_s, min_replicas):
    healthy = [r for r, (heard_s, _) in answers.items() if now_s - heard_s <= patience_s]
    if 2 * len({*healthy} & {*last}) == len(last):
        return quorum(answers, [], now_s, patience_s, min_replicas)
    return quorum(answers, last, now_s, patience_s, min_replicas)


def newcomers_vote(answers, last, now_s, patience_s, min_replicas):
    healthy = [r for r, (heard_s, _) in answers.items() if now_s - heard_s <= patience_s]
    if 2 * len(healthy) <= len(last):
        return [], []
    return quorum(answers, [], now_s, patience_s, min_replicas)


def old_answers_count(answers, last, now_s, patience_s, min_replicas):
    return quorum(answers, last, now_s, math.inf, min_replicas)


def as_few_as_there_are(answers, last, now_s, patience_s, min_replicas):
    return quorum(answers, last, now_s, patience_s, 1)


def the_lost_may_lead(answers, last, now_s, patience_s, min_replicas):
    formed = quorum(answers, last, now_s, patience_s, min_replicas)
    if not formed[0]:
        return formed
    healthy = sorted(formed[0] + formed[1])
    newest = max(step for _, step in answers.values())
    leading = [replica for replica in healthy if answers[replica][1] == newest]
    return leading, [replica for replica in healthy if replica not in leading]


def never_begins(answers, last, now_s, patience_s, min_replicas):
    if not last:
        return [], []
    return quorum(answers, last, now_s, patience_s, min_replicas)


def late_by_no_time(answers, last, now_s, patience_s, min_replicas):
    return quorum(answers, last, now_s, math.nextafter(patience_s, 0), min_replicas)


def newcomers_do_not_count(answers, last, now_s, patience_s, min_replicas):
    members = {r: answer for r, answer in answers.items() if r in last or not last}
    if quorum(members, last, now_s, patience_s, min_replicas) == ([], []):
        return [], []
    return quorum(answers, last, now_s, patience_s, min_replicas)


def votes_of_all(answers, last, now_s, patience_s, min_replicas):
    votes = [r for r in last if r in answers and now_s - answers[r][0] <= patience_s]
    if last and 2 * len(votes) <= len(answers):
        return [], []
    return quorum(answers, last, now_s, patience_s, min_replicas)


def more_than_half_of_all(answers, last, now_s, patience_s, min_replicas):
    formed = quorum(answers, [], now_s, patience_s, min_replicas)
    if last and 2 * len(formed[0] + formed[1]) <= len(answers):
        return [], []
    return formed


ANSWERS = [
    Answers(
        check.failures.interval,
        [interval, least_of_many],
        [without_the_factor, of_one_gpu],
    ),
    Answers(
        check.failures.quorum,
        [quorum, by_votes],
        [
            *(half_is_enough, newcomers_vote, old_answers_count, as_few_as_there_are),
            *(the_lost_may_lead, never_begins, late_by_no_time, newcomers_do_not_count),
            *(more_than_half_of_all, votes_of_all),
        ],
    ),
]
