// Opened from files, a page may start no worker: the search then runs in a hidden frame.
// mkdocs.yml lists this file in place of the one that Material's offline plugin would fetch.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.body.appendChild(document.createElement("iframe"))
      this.frame.hidden = true
      const inside = this.frame.contentWindow
      window.addEventListener("message", event => {
        if (event.source === inside)
          this.dispatchEvent(new MessageEvent("message", { data: event.data }))
      })
      const load = address => new Promise((resolve, reject) => {
        const script = inside.document.createElement("script")
        Object.assign(script, { src: address, onload: resolve, onerror: reject })
        inside.document.head.appendChild(script)
      })
      inside.importScripts = async (...addresses) => {
        for (const address of addresses) await load(address)
      }
      inside.postMessage = data => inside.eval("m => parent.postMessage(m, '*')")(data)
      this.ready = load(new URL(url, location.href).href)
    }

    postMessage(data) {
      const message = new MessageEvent("message", { data })
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(message))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
