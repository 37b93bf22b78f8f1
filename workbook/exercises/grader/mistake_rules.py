"""Tables of the mistakes in one place of a solution: code, what a mistake makes of it, words."""

from collections.abc import Collection

# Code, what a mistake makes of it, and the phrase. Here a, b, c and f stand for any expression,
# and x for an argument of the exercise, or a variable that its text names.
# In place of a phrase with a part that has no words there is the one after "or".
_SUM = "with a sum of losses in place of their mean"
_MEAN = "with mean losses in place of sums"
_NOT_ADDED = "that does not add {b}"
_NOT_SUBTRACTED = "that does not subtract {b}"
_TERM = "without one of its terms"
_ADDS = "that adds what comes in"
_OWN_FIRST = "that begins with the rank's own"
RULES = (
    ("a + b", "a", f"{_NOT_ADDED} to {{a}} or {_NOT_ADDED} or {_TERM}"),
    ("a + b", "b", f"that does not add {{a}} or {_TERM}"),
    ("a + b", "a - b", "that subtracts where it should add"),
    ("a - b", "a", f"{_NOT_SUBTRACTED} from {{a}} or {_NOT_SUBTRACTED} or {_TERM}"),
    ("a - b", "a + b", "that adds where it should subtract"),
    ("a * b", "a", "that does not multiply by {b} or without one of its factors"),
    ("a * b", "b", "that does not multiply by {a} or without one of its factors"),
    ("a / (b * c)", "a / b", "that does not divide by {c} or without one of its divisions"),
    ("a / (b * c)", "a / c", "that does not divide by {b} or without one of its divisions"),
    ("a / b", "a", "that does not divide by {b} or without one of its divisions"),
    ("a / b", "b / a", "that divides the wrong way round"),
    ("a / b", "a * b", "that multiplies where it should divide"),
    ("a / b", "a / comm.world_size", "that divides by the number of ranks"),
    ("a / b", "a / (comm.world_size - 1)", "that divides by one less than the number of ranks"),
    ("a / b", "a / x", "that divides by {x}"),
    ("a / b", "a / max(1, len(x))", "that divides by the number of {x}"),
    ("a // b", "a", "that does not divide by {b} or without one of its divisions"),
    ("a % b", "a", "that does not take a remainder (%)"),
    ("a % b", "(a + 1) % b", "with an index that is one too large"),
    ("a % b", "(a - 1) % b", "with an index that is one too small"),
    ("a ** 2", "a", "that does not square {a}"),
    ("a ** 0.5", "a", "that takes no square root"),
    ("a < b", "a <= b", "with <= in place of <"),
    ("a <= b", "a < b", "with < in place of <="),
    ("a > b", "a >= b", "with >= in place of >"),
    ("a >= b", "a > b", "with > in place of >="),
    ("a >= b", "a == b", "with == in place of >="),
    ("a <= b", "a == b", "with == in place of <="),
    ("torch.equal(a, b)", "torch.allclose(a, b)", "with a tolerance"),
    ("range(a)", "range(a + 1)", "with one step more"),
    ("range(a)", "range(a - 1)", "with one step fewer"),
    ("range(a)", "range(1, a)", "with one step fewer"),
    ("range(a, b)", "range(a, b - 1)", "with one step fewer"),
    ("range(a, b)", "range(a + 1, b)", "with one step fewer"),
    ("[a for b in c if f]", "sorted([a for b in c if f])", "that sorts a list"),
    ("sorted(a)", "sorted(a, reverse=True)", "that sorts in descending order"),
    ("a.isfinite()", "~a.isnan()", "that looks for NaN, not for infinity"),
    ("a.detach()", "torch.zeros_like(a)", "with zeros in place of {a} or that begins with zeros"),
    ("a.clone()", "torch.zeros_like(a)", "with zeros in place of {a} or that begins with zeros"),
    ("a.split(b)", "[a[:n] for n in b]", "that takes each piece from the beginning"),
    ("zip(*a)", "zip(*a[:-1])", "that leaves out the last of {a} or that leaves out the last"),
    ("f(comm, a)", "f(comm, a.abs())", "that loses the signs"),
    ("f(a)", "a", "without {f}"),
    ("f(a, b)", "a", "without {f}"),
    ("f(a, b)", "b", "without {f}"),
    ("f(comm, a, b)", "a", "without {f}"),
    ("a if b else c", "a", "that does not ask whether {b} or without one of its cases"),
    ("a if b else c", "c", "that does not ask whether {b} or without one of its cases"),
    ("cross_entropy(a, b)", "cross_entropy(a, b, reduction='sum')", _SUM),
    ("f.cross_entropy(a, b)", "f.cross_entropy(a, b, reduction='sum')", _SUM),
    ("f.cross_entropy(a, b, reduction='sum')", "f.cross_entropy(a, b)", _MEAN),
    ("a[b:]", "a", "that leaves out none of {a} or that leaves nothing out"),
    ("a.index_add_(b, c, f)", "a.index_copy_(b, c, f)", "that overwrites where it should add"),
    ("a.topk(b)", "a.topk(b, largest=False)", "that takes the smallest"),
    ("a.tensor_split(b)", "[*a[: len(a) // b * b].view(b, -1)]", "that leaves out a remainder"),
    ("ring_all_reduce(comm, a)", "ring_all_reduce(comm, a, 'mean')", "with a mean over the ranks"),
    ("ring_all_reduce(comm, a, b)", "ring_all_reduce(comm, a)", "with a sum over the ranks"),
    ("comm.exchange(a, b, c, f)", "c.add_(comm.exchange(a, b, c.clone(), f))", _ADDS),
    ("comm.recv(a, b)", "a.add_(comm.recv(a.clone(), b))", _ADDS),
    ("a.backward(b)", "a.sum().backward()", "that begins backward with ones"),
    ("a += b", "a[...] = b", "that overwrites where it should add"),
    ("a += b", "a += b / comm.world_size", "with a mean over the ranks"),
    ("a += b", "a = a + b", "that does not change {a}"),
    ("a += b", "pass", "that does not change {a}"),
    ("a -= b", "a += b", "that adds where it should subtract"),
    ("right, left = a, b", "left, right = a, b", "with the neighbors exchanged"),
    ("dst, src = a, b", "src, dst = a, b", "with sender and receiver exchanged"),
    ("a[dst]", "a[comm.rank]", "with its own rank in place of its neighbor's"),
    ("a[src]", "a[comm.rank]", "with its own rank in place of its neighbor's"),
    ("comm.send(a, b)", "comm.send(x, b)", "that sends {x}"),
    ("comm.exchange(a, b, c, f)", "comm.exchange(x, b, c, f)", "that sends {x}"),
    ("return a", "return x", "that returns {x}"),
    ("return a", "return a - x", "that leaves {x} out"),
    ("return a, b", "return x, b", "that returns {x} as entry 0"),
    ("return a, b", "return a, x", "that returns {x} as entry 1"),
    ("return a, b, c", "return x, b, c", "that returns {x} as entry 0"),
    ("return a, b, c", "return a, b, x", "that returns {x} as entry 2"),
    ("return a, b", "return b, a", "that returns its results in another order"),
    ("return a", "return (lambda d: [d[comm.rank - n] for n in range(len(d))])(a)", _OWN_FIRST),
    ("return a", "return (lambda d: [d.pop(comm.rank), *d])(a)", _OWN_FIRST),
    ("return a", "return [*a[comm.rank :], *a[: comm.rank]]", _OWN_FIRST),
)
LOOPS = {
    "list(a)[1:]": "that leaves out the first turn of a loop",
    "list(a)[:-1]": "that leaves out the last turn of a loop",
    "list(a)[::-1]": "with a loop in the reverse order",
}
# Terms of solutions in words that are not in them.
TERMS = {"is_target.float()": "1 at the target", "of_target": "the target's logit"}
TERMS |= {"layer.forward_s": "forward_s", "layer.backward_s": "backward_s"}
TERMS |= {"total.log()": "the logarithm", "highest[:, None]": "the maximum"}
TERMS |= {"passing": "what it passes on", "push": "the gradient"}
TERMS |= {"everyone[comm.rank]": "its own"}
TERMS |= {"left[places]": "to 0 what it sent", "min(chunk, longer)": "1 for each longer chunk"}
TERMS |= {"filling": "a bucket is left at the end", "not missing[turn]": "the bucket is full"}
# A function, an operation or a rank -> what it may be taken for.
_REDUCTIONS = ("sum", "mean", "median", "max", "min")
OTHER_NAMES: dict[str, Collection[str]] = dict.fromkeys(_REDUCTIONS, _REDUCTIONS)
OTHER_NAMES |= {"maximum": ["minimum"], "sub_": ["add_"], "add_": ["copy_"]}
OTHER_NAMES |= {"all": ["any"], "any": ["all"]}
OTHER_NAMES |= {"dst": ["src"], "src": ["dst"], "left": ["right"], "right": ["left"]}
