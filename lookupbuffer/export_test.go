package lookupbuffer

import "github.com/kvport/kvport/connector"

// ItemHeader and ParseItemHeader are the frame codec, for its fuzz target.
func ItemHeader(k connector.StoreKey, replace bool) []byte { return itemHeader(k, replace) }

// ParseItemHeader decodes what ItemHeader encodes.
func ParseItemHeader(h []byte) (connector.StoreKey, bool, error) { return parseItemHeader(h) }
