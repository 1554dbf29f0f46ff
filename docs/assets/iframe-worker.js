/* Search on pages that are opened from a disk. A browser starts no Worker from file://, so the search script runs in a
   hidden frame, behind the interface of a Worker. On a server the Worker of the browser is used. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow, script = inner.document.createElement("script");
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inner = new Promise((resolve) => { script.onload = () => resolve(inner); });
      script.src = url;
      inner.document.body.append(script);
    }
    postMessage(data) {
      this.inner.then((inner) => inner.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
  window.Worker = window.IFrameWorker;
}
