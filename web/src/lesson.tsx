import { render } from "preact";
import { Lesson } from "./simulations";
import "./style.css";
import "./lesson.css";

const place = document.getElementById("app");
if (place) render(<Lesson />, place);
