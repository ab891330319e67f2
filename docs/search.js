// The search runs in a worker, which browsers refuse to pages that are opened as files. There an iframe stands for it.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget { // the search asks for the first of these names
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.inside.importScripts = (...urls) => urls.reduce((before, each) => before.then(() => this.load(each)), Promise.resolve())
      this.loaded = this.load(url)
    }
    load(url) {
      return new Promise(loaded => {
        const script = this.inside.document.createElement("script")
        script.src = url
        script.onload = loaded
        this.inside.document.body.append(script)
      })
    }
    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
