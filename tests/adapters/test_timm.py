"""Adapters of the vision models of timm: of transformers and of convolutions."""

import pytest
import torch

import adapterhub as ah

timm = pytest.importorskip("timm")
TOLERANCE = 5e-6
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
WINDOWS = {
    "img_size": 32, "window_size": 4, "embed_dim": 8, "depths": (1, 1), "num_heads": (2, 2)
}  # fmt: skip
# name -> the model of timm, its options, and the sites at which all methods can be
MODELS = {
    "vit": ("vit_tiny_patch16_224", SMALL, None),
    "beit": ("beit_base_patch16_224", SMALL, None),
    "eva": ("eva02_tiny_patch14_224", SMALL, None),
    "swin": ("swin_tiny_patch4_window7_224", WINDOWS, None),
    "convnext": ("convnext_tiny", {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}, "'ffn.*'"),
    "efficientnet": ("test_efficientnet", {}, "'conv_*'"),
    "resnet": ("test_resnet", {}, "'conv2'"),
}
ATTENTION = {"vit", "beit", "eva", "swin"}
READ = {"beit", "eva"}
OF_CONVOLUTIONS = {"efficientnet", "resnet"}
METHODS = ("lora", "dora", "loha", "ia3", "houlsby")


def model(name):
    torch.manual_seed(0)
    kind, options, _ = MODELS[name]
    return timm.create_model(kind, num_classes=3, **options).eval()


def images(name):
    size = MODELS[name][1].get("img_size", 32)
    return torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_the_life_of_an_adapter_of_a_vision_model(name, method, tmp_path):
    net, x = model(name), images(name)
    bare = net(x)
    sites = MODELS[name][2]
    if method == "houlsby" and name in OF_CONVOLUTIONS:
        with pytest.raises(ah.AdapterhubError, match="no such site"):
            ah.attach(net, "houlsby(size=4)")
        return
    options = "size=4" if method == "houlsby" else f"sites=[{sites}]" if sites else ""
    adapter = ah.attach(net, f"{method}({options})", head=[net.pretrained_cfg["classifier"]])
    assert (net(x) - bare).abs().max().item() <= (1e-3 if method == "houlsby" else 1e-5)
    net.train()
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        loss = torch.nn.functional.cross_entropy(net(x), torch.tensor([0, 1, 2, 1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    net.eval()
    assert losses[-1] < losses[0]
    trained = net(x).detach()
    adapter.save(tmp_path / "a")
    if method != "houlsby":
        assert ah.merge(net, batch=(x,)).difference <= 1e-4
        torch.testing.assert_close(net(x), trained, atol=1e-4, rtol=1e-4)
        ah.unmerge(net)
    ah.detach(net)
    assert torch.equal(net(x), bare)
    fresh = model(name)
    ah.load(fresh, tmp_path / "a")
    torch.testing.assert_close(fresh(x), trained, atol=TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(ATTENTION))
def test_attention_has_the_roles_of_transformers(name):
    sites = ah.anatomy_of(model(name)).sites
    roles = {site.role for site in sites.values()}
    assert roles >= {"attn.q", "attn.o", "ffn.up", "ffn"}
    # An attention of BEiT and EVA reads the weights of `qkv` itself, so nothing sees their input.
    read = {site.inside for site in sites.values() if site.role == "attn.q"}
    assert ("attn" in roles, read) == ((False, {True}) if name in READ else (True, {False}))
