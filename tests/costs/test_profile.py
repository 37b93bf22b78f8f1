"""What layers cost, counted and measured."""

from torch import nn

from labkit.costs.layer_profile import profile_layers


def test_a_profile_has_the_bytes_of_the_shapes_and_times_above_zero():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 2))
    found = profile_layers(model, 6, (3, 4), repeats=2, name="tiny")
    assert (found.model, found.batch_size, found.input_bytes) == ("tiny", 6, 6 * 12 * 4)
    assert [layer.name for layer in found.layers] == ["Flatten", "Linear", "Tanh", "Linear"]
    assert [layer.output_bytes for layer in found.layers] == [6 * n * 4 for n in (12, 5, 5, 2)]
    assert [layer.parameter_bytes for layer in found.layers] == [0, 65 * 4, 0, 12 * 4]
    # The second Linear keeps what Tanh has kept already.
    assert [layer.held_bytes for layer in found.layers] == [0, 6 * 12 * 4, 6 * 5 * 4, 0]
    assert all(layer.forward_s > 0 for layer in found.layers)
    assert [layer.backward_s > 0 for layer in found.layers] == [False, True, True, True]
    assert all(parameter.grad is None for parameter in model.parameters())
