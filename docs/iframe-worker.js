// Browsers start no worker from a page that lies in a folder, and the theme searches in one. There, a frame takes its
// place: the theme's script asks for it by this name.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = [] // what is sent before the script is there
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.inside.importScripts = (...urls) => Promise.all(urls.map(each => this.load(each)))
      this.load(url).then(() => this.waiting.splice(0).forEach(data => this.deliver(data)))
    }

    load(url) {
      return new Promise((done, failed) => {
        const script = this.inside.document.createElement("script")
        script.src = url
        script.onload = () => { this.ready = true; done() }
        script.onerror = () => failed(new Error(`cannot load ${url}`))
        this.inside.document.head.append(script)
      })
    }

    deliver(data) {
      this.inside.dispatchEvent(new MessageEvent("message", { data }))
    }

    postMessage(data) {
      this.ready ? this.deliver(data) : this.waiting.push(data)
    }

    terminate() {
      this.inside.frameElement.remove()
    }
  }
  window.Worker = window.IFrameWorker
}
