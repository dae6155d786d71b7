-- Show how far a running job is, if this execution still holds it.
-- ARGV[2]: its meta, as the job's serializer gives it.
local queue, id, eid = args.queue, args.id, args.eid
if holds(queue, id, eid) then
  call('HSET', 'rq:job:' .. id, 'meta', ARGV[2])
  return 1
end
return 0
