"""A convolutional variational autoencoder (Kingma & Welling 2014, arXiv:1312.6114) of Fashion-MNIST.

Claim     the negative evidence lower bound, of one sample per image, is below 246 nats per test image
Command   python experiments/fashion_vae.py
Result    244.0 nats, 18.1 of them divergence; 6 minutes of processor time in training, on two busy cores

Pixels are the probabilities of Bernoulli variables, as in most papers: 189.9 nats are the pixels' own entropy, which no
model can save. It is no likelihood of grey values (Loaiza-Ganem & Cunningham 2019, arXiv:1907.06845).
"""

import dataclasses

import jax
import numpy as np
import optax

import jaxnn as jn


@dataclasses.dataclass(frozen=True)
class Config:
    latents: int = 16  # Numbers that an image is encoded in
    features: tuple[int, int] = (16, 64)  # Channels of the encoder's convolutions, and in reverse of the decoder's
    beta: float = 1.0  # Weight of the divergence in training; above 1: a beta-VAE (Higgins et al. 2017)
    learning_rate: float = 2e-3  # Peak learning rate of Adam, with cosine decay to zero
    batch_size: int = 128  # Examples per step
    num_steps: int = 4_680  # Updates: ten epochs
    seed: int = 0  # Determines initial parameters, data order and samples of the latents


def network(config):
    encoder = jn.models.CNN(2 * config.latents, blocks=tuple((n,) for n in config.features), dense=())
    return jn.models.VAE(encoder, jn.models.ConvDecoder((28, 28, 1), features=config.features[::-1]))


def task(config):
    model = network(config)

    def init(key, batch):
        return model.init(key, batch.inputs)["params"], {}

    def nats(params, batch, key):
        """``[batch]`` each: minus the log-likelihood of the pixels, given a sample of the latents; the divergence."""
        outputs = model.apply({"params": params}, batch.inputs, rngs={"latents": key})
        pixels = optax.sigmoid_binary_cross_entropy(outputs.reconstruction, batch.inputs).sum((1, 2, 3))
        return pixels, outputs.kl()

    def loss(params, model_state, batch, key):
        pixels, kl = nats(params, batch, key)
        return (pixels + config.beta * kl).mean(), (model_state, {"pixels": pixels.mean(), "kl": kl.mean()})

    def evaluate(params, model_state, batch, key):
        pixels, kl = (values @ batch.mask for values in nats(params, batch, key))
        return {"loss": pixels + kl, "pixels": pixels, "kl": kl, "count": batch.mask.sum()}

    def predict(params, model_state, images):
        return jax.nn.sigmoid(model.apply({"params": params}, images).reconstruction)

    return jn.Task(init, loss, evaluate, predict)


def optimizer(config):
    return optax.adam(jn.schedules.cosine(config.learning_rate, config.num_steps))


def pictures(run):
    """Rows of test images, each above the row of their reconstructions; and images decoded from random latents."""
    images = jn.data.fashion_mnist().test.examples.inputs[:24]
    pairs = np.stack([images / 255, run.predict(images)]).reshape(2, 2, 12, 28, 28, 1)
    noise = jax.random.normal(jax.random.key(0), (48, run.config.latents))
    logits = network(run.config).apply({"params": run.state.params}, noise, method="decode")
    draws = jax.nn.sigmoid(logits).reshape(4, 12, 28, 28, 1)
    return {"pairs": pairs.swapaxes(0, 1).reshape(4, 12, 28, 28, 1), "draws": draws}


experiment = jn.Experiment(Config(), lambda config: jn.data.fashion_mnist(), task, optimizer)
options = jn.RunOptions(probes=(pictures,))

if __name__ == "__main__":
    run = jn.main(experiment, options=options)
    if isinstance(run, jn.Run) and run.dir is not None:
        print(f"pictures in {run.dir / 'probes' / 'pictures'}")
