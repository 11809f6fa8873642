// Browsers allow no workers to a page that is opened as a file. Then the search, which is one, runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      this.ready = new Promise((loaded) => {
        inside.postMessage = (data) => this.onmessage?.({ data });
        const script = inside.document.createElement("script");
        script.src = new URL(url, location.href);
        script.onload = loaded;
        inside.document.body.append(script);
      });
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.onmessage?.({ data }));
    }
    terminate() {
      this.frame.remove();
    }
  };
}

// Wide tables scroll: let the keyboard reach them
addEventListener("load", () => {
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) table.tabIndex = 0;
});
