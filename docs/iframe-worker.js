/* Search from a folder. A page that is opened as a file may start no worker, so the worker's script runs
   in a hidden frame of the page and is sent the same messages. The theme waits for `Worker`; it takes
   this one only where the page is a file. */
if (location.protocol === "file:")
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      this.inside = this.frame.contentWindow
      this.heard = message => {
        if (message.source !== this.inside) return
        const copy = new MessageEvent("message", { data: message.data })
        this.dispatchEvent(copy)
        if (this.onmessage) this.onmessage(copy)
      }
      window.addEventListener("message", this.heard)
      this.ready = new Promise(done => { this.frame.onload = done })
      const load = "importScripts = (...urls) => urls.reduce((before, url) => before.then(() =>" +
        " new Promise(done => { const script = document.createElement('script');" +
        " script.src = url; script.onload = script.onerror = done;" +
        " document.body.appendChild(script) })), Promise.resolve())"
      this.inside.document.open()
      this.inside.document.write(
        `<html><body><script>postMessage = data => parent.dispatchEvent(new MessageEvent("message",` +
        ` { data, source: window }));${load}<\/script><script src="${url}"><\/script></body></html>`)
      this.inside.document.close()
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      window.removeEventListener("message", this.heard)
      this.frame.remove()
    }
  }
