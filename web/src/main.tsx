import { render } from "preact";
import { Chat } from "./chat";
import "./style.css";

const place = document.getElementById("app");
if (place) render(<Chat />, place);
