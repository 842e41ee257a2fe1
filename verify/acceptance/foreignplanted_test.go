package acceptance

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/stretchr/testify/require"
)

// change is one header or field of a router's request that is not as its source sends it.
type change struct {
	to    leg
	field string // of the body, of its kv_transfer_params, or a header
	value any    // or missing
	says  string // which part of the contract breaks; empty: nothing does, since engines ignore the field
}

// missing is the value of a field that is not sent.
type missing struct{}

const (
	headerField = "header "
	paramsField = "kv_transfer_params."
)

// String names a change in a test's output.
func (c change) String() string {
	if c.value == (missing{}) {
		return fmt.Sprintf("%s: no %s", c.to, c.field)
	}
	return fmt.Sprintf("%s: %s is %v", c.to, c.field, c.value)
}

// apply makes the change in a request that goes out.
func (c change) apply(to leg, h http.Header, r fields) {
	if to != c.to {
		return
	}
	if name, is := strings.CutPrefix(c.field, headerField); is {
		if h.Del(name); c.value != (missing{}) {
			h.Set(name, fmt.Sprint(c.value))
		}
		return
	}
	at, name := r, c.field
	if inner, is := strings.CutPrefix(c.field, paramsField); is {
		at, name = maps.Clone(paramsOf(r)), inner
		r["kv_transfer_params"] = at
	}
	if delete(at, name); c.value != (missing{}) {
		at[name] = c.value
	}
}

// saysTo is what the contract says where a router hides what engines refuse.
func (c change) saysTo(f *foreign) string {
	switch {
	case !f.goesOn || c.says != "min_tokens" && c.says != "Content-Type":
		return c.says
	case c.to == prefillLeg:
		return ends
	}
	return "complete: "
}

// What a contract says when it is broken.
const (
	ends       = "the prefill engine generated "
	loadsLess  = "the decode engine loaded "
	noHandover = "the prefill engine's answer has do_remote_"
)

// read are changes of what engines read, for any router. Of stores, nothing asks for a handover.
func read() []change {
	other := []fields{{"role": "user", "content": "something else"}}
	return []change{
		{prefillLeg, "max_tokens", 5, ends},
		{prefillLeg, "min_tokens", 5, "min_tokens"},
		{prefillLeg, "prompt", "something else", loadsLess},
		{prefillLeg, "cache_salt", "of another tenant", loadsLess},
		{prefillLeg, "cache_salt", missing{}, loadsLess},
		{prefillLeg, headerField + "Content-Type", "text/plain", "Content-Type"},
		{decodeLeg, "max_tokens", 3, "other tokens"},
		{decodeLeg, "min_tokens", 5, "min_tokens"},
		{decodeLeg, "prompt", "something else", "other tokens"},
		{decodeLeg, "stream", false, "complete: "},
		{decodeLeg, "stream_options", missing{}, "no usage"},
		{decodeLeg, "return_token_ids", missing{}, "other tokens"},
		{decodeLeg, "cache_salt", "of another tenant", loadsLess},
		{decodeLeg, headerField + "Content-Type", "text/plain", "Content-Type"},
		{prefillLeg, "messages", other, loadsLess},
		{prefillLeg, "max_completion_tokens", 5, ends},
		{decodeLeg, "messages", other, "another text"},
		{decodeLeg, "max_completion_tokens", 3, "another text"},
	}
}

// handedOver are changes of kv_transfer_params, for routers that pass them on.
func handedOver() []change {
	const decodes, prefills = paramsField + "do_remote_decode", paramsField + "do_remote_prefill"
	return []change{
		{prefillLeg, "stream", true, "the prefill engine's answer"},
		{prefillLeg, "kv_transfer_params", missing{}, noHandover},
		{prefillLeg, decodes, false, noHandover},
		{prefillLeg, decodes, missing{}, noHandover},
		{prefillLeg, decodes, "true", decodes},
		{prefillLeg, prefills, true, noHandover},
		{prefillLeg, prefills, "false", prefills},
		{prefillLeg, paramsField + "transfer_id", "tx1", paramsField + "transfer_id"},
		{decodeLeg, "kv_transfer_params", missing{}, loadsLess},
		{decodeLeg, prefills, "yes", prefills},
		{decodeLeg, decodes, "no", decodes},
		{decodeLeg, paramsField + "transfer_id", "tx1", paramsField + "transfer_id"},
		{decodeLeg, paramsField + "kvport_ticket", missing{}, loadsLess},
		{decodeLeg, paramsField + "kvport_ticket", "AAAA", loadsLess},
		{decodeLeg, paramsField + "kvport_ticket", 7, paramsField + "kvport_ticket"},
	}
}

// ignored are changes that engines do not notice, each of which can be made together with the others. docs/router.md lists the fields.
func ignored(f *foreign) (list []change) {
	list = []change{
		{prefillLeg, headerField + "Authorization", "Bearer another", ""}, // without --api-key-file
		{decodeLeg, headerField + "Authorization", missing{}, ""},
		{prefillLeg, headerField + "X-Request-Id", "another", ""},
		{decodeLeg, headerField + "X-Request-Id", missing{}, ""},
		{prefillLeg, "stream_options", fields{"include_usage": true}, ""},
		{prefillLeg, "cache_hit_threshold", 0.9, ""},
		{decodeLeg, "cache_hit_threshold", 0.9, ""},
		{decodeLeg, "disagg_prefill_resp", fields{"id": "x"}, ""},
	}
	if f.loads {
		for field, value := range (fields{"remote_engine_id": "another", "remote_block_ids": []int{1, 2}, "remote_host": "10.9.9.9", "remote_port": 9, "tp_size": 2}) {
			list = append(list, change{prefillLeg, paramsField + field, value, ""}, change{decodeLeg, paramsField + field, value, ""})
		}
		list = append(list, change{decodeLeg, paramsField + "do_remote_prefill", false, ""})
	}
	return list
}

// without is a list of changes that leaves all fields out.
func without(list []change) []change {
	list = slices.Clone(list)
	for i := range list {
		list[i].value = missing{}
	}
	return list
}

// planted changes one header or field of a router at a time, and requires that the contract notices.
func (c *contract) planted(router func() *foreign, check func(*foreign) error, changes []change) {
	c.Helper()
	for _, change := range changes {
		chats := change.field == "messages" || change.field == "max_completion_tokens"
		if f := router(); !chats || !f.noChats {
			f.name += ", " + change.String()
			f.alter = change.apply
			require.ErrorContains(c, check(f), change.saysTo(f), f.name)
		}
	}
	if f := router(); f.picker != "" {
		f.name, f.picker = f.name+", the picker's header has another name", "x-prefill-host-port"
		require.ErrorContains(c, check(f), "generated 0 tokens", f.name)
	}
}

// plantedIgnored changes all that engines ignore at once, and then leaves it out, and requires that the contract is kept.
func (c *contract) plantedIgnored(router func() *foreign, check func(*foreign) error) {
	c.Helper()
	changes := ignored(router())
	for what, list := range map[string][]change{"other": changes, "without": without(changes)} {
		c.holds(func() *foreign {
			f := router()
			f.name += ", " + what + " values that engines ignore"
			f.alter = func(to leg, h http.Header, r fields) {
				for _, change := range list {
					change.apply(to, h, r)
				}
			}
			return f
		}, check)
	}
}
