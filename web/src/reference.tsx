import { render } from "preact";
import { Reference } from "./api-reference";
import "./style.css";
import "./reference.css";

const place = document.getElementById("app");
if (place) render(<Reference />, place);
