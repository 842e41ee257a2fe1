package router

import (
	"cmp"
	"context"
	"net"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"
)

// targetsAtOnce is how many targets of SRV records are looked up at once.
const targetsAtOnce = 16

// hosts finds the addresses and ports of a name. Of SRV records the first are used in the order of their targets; more is
// how many are left out.
func (l *lookups) hosts(ctx context.Context, n dnsName) (hosts []string, more int, err error) {
	if !n.srv {
		hosts, err = l.addresses(ctx, n.host, n.port)
		return hosts, 0, err
	}
	_, records, err := l.config.Resolver.LookupSRV(ctx, "", "", n.host)
	if err != nil {
		return nil, 0, err
	}
	records = slices.DeleteFunc(records, func(r *net.SRV) bool { return r.Port == 0 || !isName(strings.TrimSuffix(r.Target, ".")) })
	slices.SortFunc(records, func(a, b *net.SRV) int {
		return cmp.Or(cmp.Compare(strings.ToLower(a.Target), strings.ToLower(b.Target)), cmp.Compare(a.Port, b.Port))
	})
	more = max(0, len(records)-maxAnswers)
	records = records[:len(records)-more]
	// The targets are known to the server that knows the name, and maybe to no other.
	found := make([][]string, len(records))
	var tasks errgroup.Group
	tasks.SetLimit(targetsAtOnce)
	for i, r := range records {
		tasks.Go(func() error {
			list, err := l.addresses(ctx, r.Target, r.Port)
			if isMissing(err) {
				return nil // it has just left
			}
			found[i] = list
			return err
		})
	}
	if err := tasks.Wait(); err != nil {
		return nil, 0, err
	}
	return slices.Concat(found...), more, nil
}

// addresses finds the addresses of a host.
func (l *lookups) addresses(ctx context.Context, host string, port uint16) (list []string, err error) {
	addresses, err := l.config.Resolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, err
	}
	for _, a := range oneFamily(addresses) {
		list = append(list, netip.AddrPortFrom(a, port).String())
	}
	return list, nil
}
