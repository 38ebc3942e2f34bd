import { Component, type ComponentChildren } from "preact";

interface Fenced {
  name: string;
  children: ComponentChildren;
}

/** What fails within it is replaced by a word about that; the rest of the page goes on. */
export class Fence extends Component<Fenced, { failed: boolean }> {
  override state = { failed: false };

  static override getDerivedStateFromError() {
    return { failed: true };
  }

  override render({ name, children }: Fenced) {
    return this.state.failed ? (
      <p class="error fence" role="alert">
        {name} cannot be shown: the page has failed at it. The rest goes on.
      </p>
    ) : (
      children
    );
  }
}
