"""The life of an adapter on a model: build, attach, activate, route, load, save, export, detach. No
equations (methods/), no hooks (hooks/), no stores (registry/)."""
