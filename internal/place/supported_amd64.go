package place

// supported says whether stores and loads of this processor were shown to be in the order that the protocol needs.
const supported = true
