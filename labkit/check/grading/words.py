"""The words of every diagnosis: a mistake has an id, and its sentence is stored here, once.

A judge names what it finds by id and numbers, as a ``Mistake``; only the report turns it into
words. The first part of an id says who can find it: the kit (``value``, ``sum``, ``run`` ...), or
the exercise set.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Mistake:
    """What is wrong: an id, and what its words name.

    Args:
        id: a key of ``WORDS``.
        why: told after a colon, if any.
        also: told after that, each as a sentence.
        details: the numbers, texts and further mistakes that stand in the words.
    """

    def __init__(self, id: str, why: Found = None, also: Iterable[Found] = (), **details: Any):
        assert id in WORDS, f"no words for the mistake {id!r}"
        self.id, self.why, self.also, self.details = id, why, list(filter(None, also)), details

    def __str__(self) -> str:
        text = WORDS[self.id].format(**self.details) + (f": {self.why}" if self.why else "")
        return text + "".join(f". {more}" for more in self.also)

    def __repr__(self) -> str:
        return f"Mistake({self.id!r}, {str(self)!r})"

    def explain(self, why: Found) -> None:
        """Add ``why`` behind the last colon."""
        if isinstance(self.why, Mistake):
            self.why.explain(why)
        else:
            self.why = self.why or why

    @property
    def ids(self) -> list[str]:
        """Its own id, then those of the mistakes that it names."""
        inner = [*self.details.values(), self.why, *self.also]
        return [self.id, *(i for one in inner if isinstance(one, Mistake) for i in one.ids)]


# What a judge returns: a mistake, a page's own sentence, or nothing where nothing is wrong.
Found = Mistake | str | None


def named(key: str) -> Mistake | str:
    """The mistake with this id; a page's own sentence stands for itself."""
    return Mistake(key) if key in WORDS else key


WORDS = {
    "row": "{row}: {what}",
    "place": "{place}: {what}",
    # The function, before it is called and where it does not end
    "fn.missing": "a function is needed, got {kind}: pass its name, without ()",
    "fn.signature": "it takes {takes}, and is called with ({signature})",
    "fn.cannot_travel": "it cannot be sent to other processes, because of something that it uses "
    "from outside ({error}): make that inside the function",
    "run.stuck": "{story}",
    "run.error": "{story}",
    "check.broke": "the check itself failed with {error}",
    # Answers without ranks
    "answer.raised": "{place}: it raised {error}",
    "answer.nothing": "it returned nothing: return the answer",
    "answer.wrong": "{call} is {due}, and yours says {answer}",
    # Values: which one is wrong
    "value.wrong": "{place}, rank {rank} is the first that is wrong{part}",
    "value.differs": "it is {value}, expected {due}",
    "value.kind": "it is {found}, expected {due}",
    "value.one_right": "Rank {rank} alone has the right result",
    "value.size_below_ranks": "{size} elements came out right; here there are fewer elements "
    "than ranks, so chunks may be empty",
    "value.size_indivisible": "{size} elements came out right; {odd} is not divisible by "
    "{ranks}, so chunks differ in length",
    "value.size_one": "{size} elements came out right; here there is one",
    "value.size_other": "{size} elements came out right; here there are {odd}",
    "value.last_bits": "{place}, ranks 0 and {rank} have the same sum except for the last bits: "
    "they add in different orders, so replicas drift apart",
    # Values: what the wrong one looks like
    "value.new_chunks": "the list holds the right chunks, but they are new tensors, and the "
    "tensor that the chunks were cut from is not changed: write into them (+=, .copy_, recv)",
    "value.new_tensor": "what it returned is right, but the tensor it was given is not changed: "
    "work in place (tensor += ..., tensor.copy_(...)), since tensor = tensor + ... makes another",
    "value.not_finite": "it holds NaN or infinity: was memory of torch.empty used before it was "
    "filled?",
    "value.zeros": "it is all zeros",
    "value.unchanged": "unchanged: it still holds the rank's own values",
    "value.elsewhere": "it holds what belongs in {name} {index}",
    "value.rotated": "it holds what belongs in {name} {index}: the numbers are rotated by {shift}",
    "value.numbers": "{start} {value}, expected {due}",
    "chunk.other_complete": "chunk {other} is complete there, instead of chunk {chunk}: the "
    "numbers are rotated by {shift}",
    "chunk.foreign": "values of {chunks} are in it: wrong chunk sent, or received",
    # Values: how a sum or a copy went wrong
    "sum.rounded": "the right values, but rounded: are they held in 16 bits?",
    "sum.mean": "divided by {ranks}: it is the mean, expected the sum",
    "sum.not_divided": "{ratio:g} times the expected value: not divided by {ratio:g}, or added "
    "too often",
    "sum.scaled": "{ratio:.3g} times the expected value",
    "sum.overwritten": "overwritten instead of added: it holds rank {rank}'s values alone",
    "sum.own_twice": "the rank's own values are added twice",
    "sum.twice": "the values of {ranks} are added more than once",
    "sum.own_missing": "the rank's own values are missing from the sum",
    "sum.lacks_one": "partial sum: it holds {found}, and lacks {absent} (one step too few?)",
    "sum.lacks": "partial sum: it holds {found}, and lacks {absent}",
    "sum.other": "it is {found}, expected {wanted}",
    "copy.other_rank": "it holds rank {found}'s values, expected rank {wanted}'s",
    "copy.added": "added to the rank's own values, instead of overwriting them",
    "copy.mixed": "it is {found}, expected rank {wanted}'s values alone",
    # Traffic
    "traffic.off_target": "{place}: {spent}, where the target is {due}",
    "traffic.nothing": "nothing was sent",
    "traffic.doubled": "twice as many as needed",
    "messages.one_more": "one step too many",
    "messages.one_less": "one step too few",
    "messages.one_in_all_more": "one message too many (does a rank send to itself, or get it "
    "twice?)",
    "bytes.whole_tensor": "the whole tensor is sent in each message, instead of a chunk",
    "rounds.send_then_recv": "each rank sends and receives one after the other; comm.exchange "
    "does both at once",
    "peers.wrong": "{place}, rank {rank} sends to {stray}; allowed: {allowed}",
    "peers.bottleneck": "all send to rank {hub}, which becomes the bottleneck",
    "peers.left": "that is the left neighbour, instead of the right one",
    "peers.right": "that is the right neighbour, instead of the left one",
    # Collectives with a root, and the barrier
    "gather.one_buffer": "every entry of another rank holds the last one's values: is it one "
    "buffer, received into again and again",
    "gather.order": "the entries are not in the order of the ranks",
    "scatter.unchanged": "unchanged: nothing was written into out",
    "scatter.first": "it holds the share of the first rank",
    "scatter.root": "it holds the root's own share",
    "scatter.next": "it holds the share of the next rank",
    "scatter.before": "it holds the share of the rank before",
    "scatter.reversed": "the shares are in reverse order",
    "barrier.alone": "rank {early} left before rank {absent} had come (nobody waits for it)",
    "barrier.some": "rank {early} left before rank {absent} had come ({count} of the ranks did "
    "not wait)",
    "barrier.borrowed": "no message was sent: comm.barrier did the waiting; build it of send and "
    "recv",
    # Page 08: a stage's hops
    "hops.rank": "rank {rank} is the first that is wrong",
    "hops.no_pair": "it returns something else than (entering, leaving), two tensors",
    "hops.kind": "{name} is {found}, expected {due}",
    "hops.ran_on_inputs": "leaving is made of inputs, which enter stage 0 alone: run the layers "
    "on what came in",
    "hops.not_run": "leaving is what entered: the layers did not run",
    "hops.other_output": "leaving is not what the layers make of what entered",
    "hops.sent_what_entered": "entering is what had entered stage {before}, too: what leaves a "
    "stage has to be sent, not what entered it",
    "hops.swapped": "entering is what the layers made: return what went into them first, what "
    "came out second",
    "hops.other_input": "entering is not what left stage {before}: was it sent before the layers "
    "had run?",
    "hops.runs": "its layers ran {runs} times, expected once",
    "hops.no_graph": "leaving has no graph behind it, and backward could not begin there: only "
    "what is sent may be detached, not what is kept (was it computed under no_grad?)",
    "hops.asks_nothing": "entering asks for no gradient, so none could go back to the stage "
    "before: entering.requires_grad_() before the layers run",
    "hops.no_leaf": "entering is no leaf of the graph (a copy, or a result), and autograd stores "
    "no .grad there: return the very tensor that was received",
    "hops.gets_nothing": "entering asks for a gradient and gets none: the layers ran before it "
    "asked, or ran on another tensor",
    "hops.no_gradients": "the stage's parameters have no gradient: backward has not run "
    "(torch.autograd.grad returns gradients and stores none; leaving.backward(gradient) stores "
    "them)",
    "hops.began_with_ones": "the gradient that came is not used: backward began with ones",
    "hops.passed_on": "a stage passes on the gradient that it got; what goes back is the "
    "gradient of what had entered, entering.grad",
    "hops.activation_back": "the activation went back, instead of its gradient: entering.grad",
    "hops.added": "the gradient that came is added to entering.grad: the layers' backward has "
    "included it already",
    "hops.averaged": "a gradient was divided by the number of ranks on its way: these are parts "
    "of one model, not replicas, and nothing is averaged",
    "hops.twice": "backward ran twice, and gradients add up",
    "hops.zeros": "what went back is all zeros: was .grad taken after it had been zeroed, or "
    "never filled?",
    # Page 01: accumulation, loss scaling, sparse all-reduce
    "accumulate.mean_of_means": "micro-batches of different sizes count alike: it is the mean of "
    "their means",
    "accumulate.sum": "the sum over the samples: it is not divided by batch_size",
    "accumulate.own_samples": "divided by this rank's own samples, instead of those of all ranks",
    "accumulate.last": "only the last micro-batch is in it: each one overwrites what was there",
    "accumulate.own_share": "this rank's share alone: nothing of the other ranks is in it",
    "accumulate.ranks_alike": "every rank counts alike: it is the mean of the ranks' means",
    "scaling.still_scaled": "the gradient is still multiplied by the scale",
    "scaling.over_ranks": "divided by the ranks, too: the parts already add up to the gradient "
    "of the mean loss",
    "scaling.update_anyway": "the update was made although the sum had overflowed",
    "scaling.lowered_and_updated": "the scale was lowered, and yet the update was made with what "
    "had overflowed",
    "scaling.lowered_for_nothing": "the scale was lowered although nothing had overflowed",
    "scaling.patched": "only the numbers that had overflowed were left out: the whole update has "
    "to be",
    "scaling.not_lowered": "the update was left out, but the scale was not lowered: the next one "
    "will overflow, too",
    "scaling.ranks_disagree": "ranks disagree: each looked at its own gradient, not at the sum",
    "scaling.own_gradient": "this rank's own gradient alone",
    "top_k.lost": "what is not sent is lost: the new residual is zero",
    "top_k.forgot_residual": "the old residual was not added to the gradient",
    "top_k.sent_and_kept": "what was sent is in the residual, too: it will be sent again",
    "top_k.kept_the_sent": "the new residual is what was sent, instead of what was not sent",
    "top_k.not_by_magnitude": "the k largest numbers were taken, not those largest in magnitude",
    "top_k.last_wins": "where two ranks send the same place, the last one wins: add them up",
    "top_k.own_alone": "this rank's own elements alone",
    "top_k.mean": "divided by the number of ranks: it is the mean, instead of the sum",
    # Page 02: data parallelism in one process
    "scatter_fairly.empty_device": "a device without a sample gets a part, too: its replica "
    "would run on nothing",
    "scatter_fairly.chunk": "a device gets nothing while others have two more: torch.chunk "
    "rounds sizes up",
    "scatter_fairly.in_turn": "samples are dealt out in turn: what is gathered will not be in "
    "the batch's order",
    "scatter_fairly.dropped": "the samples that are left over are dropped",
    "scatter_fairly.rest_to_last": "the last device gets all that is left over",
    "scatter_fairly.whole_batch": "every device gets the whole batch",
    "scatter_fairly.one_each": "every sample is a part of its own",
    "sum_devices.mean": "the mean over the devices: the parts of a sum over samples have to be "
    "added",
    "sum_devices.first_alone": "device 0's own gradients alone",
    "sum_devices.first_missing": "device 0's own gradients are not in it",
    "sum_devices.follows_first": "a parameter without a gradient on device 0 is left out",
    "sum_devices.wants_all": "a parameter without a gradient on any one device is left out",
    "sum_devices.two_alone": "only devices 0 and 1 are in it",
    "sum_devices.zeros": "zeros for a parameter that no device used, instead of None",
    "sum_devices.mean_of_some": "the mean over those devices that have a gradient, instead of "
    "the sum",
    "sum_devices.others_changed": "the gradients of other devices were changed: add into a copy "
    "of device 0's",
    "threads.order": "the results come in the order in which the threads ended, not in that of "
    "the parts",
    "threads.none": "no threads: the parts run one after another in the caller's own",
    "threads.one_by_one": "the parts do not run at the same time: start all threads before you "
    "wait for one",
    "threads.record": "under torch.no_grad() the threads still record: each begins with autograd "
    "enabled",
    "threads.do_not_record": "the caller records, and the threads do not: training would get no "
    "gradients",
    "scatter_fairly.devices": "for {devices} devices",
    "threads.results": "it returned {results}, expected [0, 10, 20]: did all threads end before "
    "it did?",
    "threads.other_error": "part {part} raised KeyError, and the caller saw {kind}: raise the "
    "part's own",
    "threads.lost_error": "part {part} raised KeyError, and the caller got {results}: the "
    "exception was lost",
    "sum_devices.kind": "expected a list of {count} sums, one per parameter, and it returned "
    "{result}",
    # Page 04: a parameter server, its workers, and ranks that are both
    "server.last_push_only": "only the last push counts: each was received over the one before, "
    "and never added",
    "server.not_divided": "the sum of the gradients is not divided by batch_size",
    "server.over_workers": "the sum is divided by the number of workers, instead of the "
    "batch_size samples that are in it",
    "server.uphill": "the update goes uphill: it is added, but it must be subtracted",
    "server.sent_old": "the workers get the parameters from before the update",
    "server.asynchronous": "a worker gets what the pushes so far have made of the parameters, as "
    "from an asynchronous server: wait for the last push, then update",
    "server.sent_sum": "the workers get the sum of the gradients, instead of the new parameters",
    "server.parameters_in_sum": "the parameters are in the sum: it has to start from zeros, or "
    "from the first push",
    "server.update_per_push": "every push makes an update with the sum so far: add all of them "
    "up, then update once",
    "server.not_in_place": "the workers have the new parameters, and the server the old: update "
    "values in place",
    "worker.unchanged": "values is unchanged: what is pulled must land in slices of it (recv "
    "writes in place)",
    "worker.added": "what is pulled is added to the old values, instead of taking their place",
    "worker.pushed_parameters": "the parameters were pushed, instead of the gradient",
    "worker.scaled": "the gradient was scaled before the push: learning rate and division are "
    "the server's",
    "worker.updated_again": "values is updated once more after the pull: the server has done it",
    "shards.over_ranks": "the sum is divided by the number of ranks, instead of the batch_size "
    "samples that are in it",
    "shards.own_gradient": "each rank has updated with its own gradient alone: no server has "
    "added them up",
    "shards.own_slice": "each rank has only the slice that it serves: nobody has pulled the "
    "others",
    "shards.unchanged": "nothing has changed: share_reduce leaves chunk (rank + 1) mod P "
    "complete, was another one updated?",
    "shards.sum": "the ranks have the sum of the gradients, instead of the new parameters",
    # Page 03: buckets, gradients of uneven shares, a sampler, accumulation
    "buckets.forward": "it goes forward: backward finds the last parameter's gradient first",
    "buckets.order": "the right buckets, but the first to leave comes last",
    "buckets.order_inside": "the right buckets, but inside each the last parameter has to come "
    "first",
    "buckets.first_cap": "the first bucket has a cap of its own",
    "buckets.first_cap_for_all": "the first bucket's cap holds for the first bucket only",
    "buckets.closed_before": "a bucket is closed once it holds its cap or more, not before it "
    "would hold more",
    "buckets.closed_late": "a bucket that holds exactly its cap is closed, too: it need not hold "
    "more",
    "buckets.rest_lost": "what is left at the end is a bucket, too",
    "buckets.empty": "nothing is left at the end: an empty list is not a bucket",
    "gradient.sum": "it is the sum over the samples: divide by the samples of the global batch",
    "gradient.twice_by_ranks": "it is divided twice: by the samples and by the ranks",
    "gradient.own_share": "it holds this rank's own samples alone: nothing was summed over the "
    "ranks",
    "gradient.mean_of_means": "every rank counts alike, however many samples it has: a mean of "
    "means is not the mean",
    "gradient.sum_of_means": "it is a sum of the ranks' means",
    "gradient.over_ranks": "it is divided by the number of ranks, instead of the number of "
    "samples",
    "gradient.own_mean": "it is the mean over this rank's own samples: nothing was summed over "
    "the ranks",
    "gradient.own_sum": "it is the sum over this rank's own samples: nothing was summed over the "
    "ranks",
    "gradient.twice_by_micro_batches": "it is divided twice: by the samples and by the "
    "micro-batches",
    "gradient.last_only": "only the last micro-batch is in it: was the gradient zeroed in "
    "between?",
    "gradient.last_missing": "the last micro-batch is not in it: sum over the ranks after its "
    "backward",
    "gradient.summed_again": "the ranks sum after every micro-batch, and what they had summed "
    "before is summed again",
    "gradient.micro_batches_alike": "micro-batches count alike, however many samples they have",
    "gradient.sum_of_micro_means": "it is a sum of the micro-batches' means",
    "sampler.epoch": "the order is that of epoch 0: the seed of an epoch is seed + epoch",
    "sampler.not_shuffled": "the samples come in their own order: shuffle them",
    "sampler.not_padded": "one rank has one sample more than another, makes one more step, and "
    "waits forever: pad until all have equally many",
    "sampler.dropped": "the rest was dropped: pad, so that no sample is left out",
    "sampler.padding": "the padding is made of other samples: repeat the beginning of the "
    "shuffled order",
    "sampler.block": "the right samples, but a block of them: rank r takes every P-th from "
    "number r on",
    "sampler.seed_by_rank": "each rank shuffles with another seed, so a sample is on two ranks, "
    "or on none",
    "sampler.other_rank": "they are another rank's: rank r takes every P-th from number r on",
    "sampler.order": "the right samples in another order",
    "gradient.none": "a parameter has no gradient: a rank without samples contributes zeros",
    "gradient.nan": "a gradient is NaN: was it divided by a share's number of samples, 0?",
    # Page 05: staleness, the rule of a bound, an asynchronous server
    "staleness.itself": "the update itself is counted, too: staleness is what came before it",
    "staleness.since_push": "it counts from the worker's latest push; the parameters are as old "
    "as its latest pull",
    "staleness.since_first_pull": "it counts from the worker's first pull: each pull makes the "
    "parameters new",
    "staleness.one_for_all": "one version is kept for all workers: each has pulled at a "
    "different time",
    "staleness.pulls": "pulls are counted as well: they change no parameters",
    "staleness.others_only": "a worker's own update between its pull and its push makes it late "
    "as well",
    "staleness.version": "it says which version was reached: staleness is how many came since "
    "the pull",
    "admission.everything": "that lets everything in: while all others can come in time the "
    "pushing worker can, too; the question is whether they still can once the version is one "
    "higher",
    "admission.one_ahead": "it looks one update ahead; of two that are equally late, one has to "
    "come after the other",
    "admission.bound_allowed": "a staleness equal to the bound is allowed",
    "admission.counts_itself": "the pushing worker is done with its gradient: only the others "
    "still have to come",
    "admission.newest_first": "the newest is taken first: the oldest has least time left",
    "async.unchanged": "the parameters have not changed: work in place (parameters -= gradient), "
    "since parameters = parameters - gradient makes a new tensor",
    "async.uphill": "the parameters went up: an update goes against the gradient",
    "async.averaged": "each gradient was divided by the number of workers: here a push is an "
    "update",
    "async.ended": "the parameters end as {ended}, expected {due}: one update per push",
    "async.answered_first": "worker {worker} pulls parameters from before its own push: update "
    "first, then answer",
    "async.own": "worker {worker} should find 1, 2, ... of its own updates in what it pulls, and "
    "finds {own}",
    # Page 15: replicas that agree to the bit, a fair way to take times
    "replicas.nothing": "rank {rank} returns nothing: every rank has to know",
    "replicas.kind": "rank {rank} returns {kind}, expected True or False",
    "replicas.disagree": "{says}: each tells what it has seen itself. Bring the answers together",
    "replicas.never": "the replicas are equal to the bit, and all say False",
    "replicas.far": "rank {last} differs by 1 in every number, and nobody noticed: compare all "
    "ranks",
    "replicas.last_bit": "rank {last} differs in the last bit of one number, and that passes for "
    "equal: allclose has a tolerance, and a sum rounds it away",
    "replicas.order": "rank 1 holds the same numbers in another order, and that passes for "
    "equal: a sum, the smallest or the largest number says nothing about places",
    "turns.no_call": "neither a nor b was called: each call runs it once and returns its seconds",
    "turns.not_in_turns": "all runs of one come before all runs of the other: whatever the "
    "machine does meanwhile counts against the second",
    "turns.count": "{name} was called {calls} times, expected {due}: once to warm up, then "
    "{repeats} repeats",
    "turns.pairs": "the calls were {pairs}: a pair is one run of each",
    "turns.same_first": "pairs in a row begin with the same contender: on a machine that slows "
    "down the other is the later one in each. Let them take turns at beginning",
    "ratio.kind": "it returns {kind}, expected a number",
    "ratio.differs": "it returns {found:.4g}, expected the median of the pairs' b / a, {due:.4g}",
    "ratio.upside_down": "that is a / b, upside down",
    "ratio.warm_up": "the warm-up is counted",
    "ratio.of_medians": "that is the ratio of the medians, not the median of the ratios: the "
    "pairs are torn apart",
    "ratio.of_sums": "that is the ratio of the sums, in which the slowest repeat counts most",
    "ratio.mean": "that is the mean of the ratios, which one hiccup moves",
    "ratio.of_bests": "that is the best of b over the best of a, two moments in which each was "
    "lucky",
    "ratio.largest": "that is the largest of the ratios",
    # Page 08: where to cut
    "cuts.equal_layers": "stages have equally many layers, but layers differ in bytes and in "
    "what they need",
    "cuts.equal_seconds": "stages are made equally long; but without a pipeline only one works "
    "at a time, and what a cut adds to the step is its hops",
    "cuts.cap_forgotten": "the cap is forgotten: every stage has to keep it",
    "cuts.cap_excluded": "a stage may need all that the cap allows",
    "cuts.output_behind": "over the cut before layer k goes the output of layer k - 1, not that "
    "of layer k",
    "cuts.all_devices": "not all devices have to be used: one more cut costs two more messages",
    "cuts.fewest": "the fewest cuts are not always best: two cheap ones may cost less than an "
    "expensive one",
    "cuts.bytes_alone": "bytes alone are counted: a message costs alpha, however short it is",
    "cuts.dearest_hop": "only the most expensive hop is counted: hops come one after the other, "
    "and add up",
    "cuts.value_alone": "training holds a parameter three times: its value, its gradient, its "
    "momentum",
    "cuts.activations_forgotten": "a stage holds its activations until backward, and they need "
    "memory as well",
    "cuts.case": "{case}",
    "cuts.kind": "it returns {answer}, expected split points, as in (3, 5)",
    "cuts.invalid": "{error}",
    "cuts.devices": "{points} makes {stages} stages: there are {devices}",
    "cuts.memory": "with {points} stage {stage} needs {needs}",
    "cuts.slower": "with {points} a step takes {yours}, and {best} is possible",
    # Page 09: the bubble, the 1F1B stream, the hop
    "bubble.work": "that is the share of work: the bubble is what is left of 1",
    "bubble.of_working": "it divides the idle time by the working time (Megatron-LM's paper "
    "counts so); here the bubble is a share of all time, idle and working",
    "bubble.of_step": "it divides by the length of the step: all stages together have P times as "
    "much",
    "bubble.formula": "that is the formula for equal stages; these are unequal, and only the "
    "slots know",
    "bubble.from_zero": "a table begins with its first slot, which need not be at second 0",
    "bubble.last_in_list": "the step ends with the slot that ends last; the last one in the list "
    "is only the last stage's",
    "bubble.inner_gaps": "a stage is idle before its first slot and after its last one, too",
    "bubble.percent": "a share is a number from 0 to 1, and this is in percent",
    "bubble.differs": "for {case} the bubble is {due:.4g}, and yours says {answer:.4g}",
    "stream.fill_and_drain": "all forwards come first on every stage: that is fill and drain, "
    "which holds all micro-batches at once; 1F1B begins with backwards as soon as it can",
    "stream.all_last": "every stage has the stream of the last one, so only that one is right: "
    "the others wait for each micro-batch to go to the end and back, unless they run some "
    "forwards ahead",
    "stream.all_first": "every stage has the stream of stage 0, so only that one is right: the "
    "nearer to the loss, the sooner a gradient comes back, and the fewer forwards have to run "
    "ahead",
    "stream.wrong_end": "the warm-up is counted from the wrong end: stage 0 is farthest from the "
    "loss, and runs most forwards ahead",
    "stream.too_long": "the warm-up is one forward too long: stage s holds P - s + 1 "
    "micro-batches, where P - s suffice (the last stage runs none ahead)",
    "stream.too_short": "the warm-up is one forward too short: a stage has nothing to do while "
    "it waits for the first gradient to come back",
    "stream.so": "So {consequence}",
    "stream.nothing": "it returned nothing: yield the actions, or return a list of them",
    "stream.no_action": '{thing} is no action: Action("forward", 0) is one, "F0" will do too',
    "stream.stage": "stage {stage} {found}{right}",
    "stream.never_ends": "{error}{right}",
    "stream.orders": "stages 0 and {stage} run their {kind}s in different orders, {first} and "
    "{other}: messages come in the order in which they are sent{right}",
    "stream.holds": "stage {stage} holds {held} at once, where {due} suffice{right}",
    "stream.slow": "a step takes {step:g} where {due:g} suffice (a forward takes 1, a backward "
    "2): stages wait that could work{right}",
    "stream.strange": "runs {actions}, but micro-batches are numbered 0 to {last}",
    "stream.strange_forward": "runs {actions}, but micro-batches are numbered 0 to {last} (is "
    "the warm-up too long for so few?)",
    "stream.repeated": "runs {actions} more than once",
    "stream.missing": "never runs {actions}",
    "stream.no_drain": "never runs {actions}: after the last forward, the backwards that the "
    "warm-up owes are still to come",
    "stream.backward_first": "runs B{m} before F{m}: a backward needs what its forward has kept",
    "hop.never_landed": "the {kind} of micro-batch {micro_batch}, expected on rank {rank}, never "
    "landed: receive into landing, in place, since another tensor is lost",
    "hop.other_landed": "the {kind} of micro-batch {micro_batch}, expected on rank {rank} from "
    "rank {source}, is instead the {found} of micro-batch {of:g} of rank {by:g}",
    "hop.calls": "everything lands, and rank {rank} takes {calls} calls of comm for {hops} hops: "
    "a hop with both halves is one comm.exchange",
}
